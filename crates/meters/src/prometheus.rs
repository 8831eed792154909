//! A counter of a Prometheus endpoint in the configuration:
//! `prometheus:http://127.0.0.1:9090/metrics#requests_total{code="200"}`. It is the sum of all matching series.
//!
//! The request is a plain HTTP/1.1 GET with limits on time and size. Host names are resolved by `/etc/hosts` only,
//! because a name server could block the loop for seconds.

use crate::common::{not_mine, refused, usable};
use crate::connection::{Address, Connection, Deadline, NotConnected};
use crate::service::opener::{Ask, Got, ask};
use crate::{Meter, MeterKind, MeterSettings};
use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Workload};
use homeostat_platform::PlatformError;
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Unit without a configured one.
pub(super) const UNIT: &str = "count";
/// Longest wait for a whole answer.
const WAIT: Duration = Duration::from_millis(400);
const BODY_MAX: usize = 8 * 1024 * 1024;
const HEADER_LINES_MAX: usize = 100;
const LINE_MAX: usize = 8192;

/// Whether an id is one of this kind.
pub fn is_mine(id: &str) -> bool {
    id.starts_with("prometheus:")
}

pub(super) struct Prometheus {
    settings: MeterSettings,
}

impl Prometheus {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self {
            settings: settings.clone(),
        }
    }
}

impl MeterKind for Prometheus {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        self.settings
            .configured_for(workload)
            .into_iter()
            .filter(|named| is_mine(&named.meter))
            .map(|named| {
                let id = named.meter.as_str();
                let unit = named.unit.as_deref().unwrap_or(UNIT);
                match Series::parse(root, id).and_then(|s| s.read()) {
                    Ok(_) => usable(id, MeterClass::Application, unit),
                    Err(e) => refused(id, MeterClass::Application, unit, e.to_string()),
                }
            })
            .collect()
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        // Only configured ids: any other must not make us open connections.
        if !is_mine(id.as_str()) || !self.settings.is_configured(workload, id) {
            return Err(not_mine(id));
        }
        let series = Series::parse(root, id.as_str())?;
        series.read()?;
        Ok(Box::new(series))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Series {
    id: String,
    address: SocketAddr,
    host: String,
    path: String,
    metric: String,
    labels: Vec<(String, String)>,
}

impl Series {
    fn parse(root: &Root, id: &str) -> Result<Self, PlatformError> {
        let wrong = |why: &str| PlatformError::Unsupported {
            what: format!("meter {id}"),
            why: format!("{why}; write prometheus:http://ADDRESS:PORT/PATH#METRIC{{LABEL=\"VALUE\"}}"),
        };
        let url = id
            .strip_prefix("prometheus:")
            .ok_or_else(|| wrong("it does not begin with prometheus:"))?;
        let rest = url
            .strip_prefix("http://")
            .ok_or_else(|| wrong("only http:// is understood"))?;
        let (page, selector) = rest
            .split_once('#')
            .ok_or_else(|| wrong("the metric after # is missing"))?;
        let (host, path) = match page.find('/') {
            Some(at) => page.split_at(at),
            None => (page, "/metrics"),
        };
        if [host, path]
            .iter()
            .any(|t| t.chars().any(|c| c.is_control() || c == ' '))
        {
            return Err(wrong("the address has a blank in it"));
        }
        let address = resolve(root, host).map_err(|why| wrong(&why))?;
        let (metric, labels) =
            parse_selector(selector.trim()).ok_or_else(|| wrong("the metric is not readable"))?;
        Ok(Self {
            id: id.to_owned(),
            address,
            host: host.to_owned(),
            path: path.to_owned(),
            metric,
            labels,
        })
    }

    fn read(&self) -> Result<f64, PlatformError> {
        let page = fetch(self.address, &self.host, &self.path).map_err(|why| match why {
            Http::Connection(e @ (Errno::TIMEDOUT | Errno::AGAIN)) => PlatformError::Busy {
                what: format!("asking {}", self.address),
                why: format!("no whole answer within {} ms ({e})", WAIT.as_millis()),
            },
            Http::Connection(e) if Address::Tcp(self.address).is_shortage(e) => PlatformError::Busy {
                what: format!("asking {}", self.address),
                why: e.to_string(),
            },
            Http::Connection(e) => PlatformError::Unsupported {
                what: format!("meter {}", self.id),
                why: format!(
                    "{} cannot be reached: {e}; start the endpoint or correct the address",
                    self.address
                ),
            },
            Http::Answer(why) => PlatformError::Unsupported {
                what: format!("meter {}", self.id),
                why: format!("{} answered {why}; correct the path", self.address),
            },
        })?;
        sum_series(&String::from_utf8_lossy(&page), &self.metric, &self.labels).ok_or_else(|| {
            PlatformError::Unsupported {
                what: format!("meter {}", self.id),
                why: "the page has no such series with a number; correct the metric or its labels".to_owned(),
            }
        })
    }
}

impl Meter for Series {
    fn read(&mut self, _: &Workload) -> Result<f64, PlatformError> {
        Series::read(self)
    }
}

fn resolve(root: &Root, host: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = host.parse::<SocketAddr>() {
        return Ok(address);
    }
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !name.ends_with(':') => {
            (name, port.parse().map_err(|_| format!("{port} is not a port"))?)
        }
        _ => (host, 80),
    };
    if let Ok(ip) = name.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let root = root.as_path().to_owned();
    let mut hosts = Vec::new();
    if let Ok((Got::Hosts, Some(file))) = ask(&Ask::Hosts { root }) {
        let most = BODY_MAX as u64;
        let _ = File::from(file).take(most).read_to_end(&mut hosts);
    }
    let hosts = String::from_utf8_lossy(&hosts).into_owned();
    let mut found = hosts.lines().filter_map(|line| {
        let mut words = line
            .split('#')
            .next()
            .unwrap_or_default()
            .split_ascii_whitespace();
        let ip: IpAddr = words.next()?.parse().ok()?;
        words.any(|w| w.eq_ignore_ascii_case(name)).then_some(ip)
    });
    let ip = found
        .next()
        .or_else(|| (name == "localhost").then_some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    ip.map(|ip| SocketAddr::new(ip, port)).ok_or_else(|| {
        format!("the name {name} is not in /etc/hosts, and no name server is asked; write its address")
    })
}

pub(super) enum Http {
    Connection(Errno),
    Answer(String),
}
impl From<NotConnected> for Http {
    fn from(e: NotConnected) -> Self {
        match e {
            NotConnected::Kernel(e) => Self::Connection(Errno::from_raw_os_error(e)),
            NotConnected::Stranger | NotConnected::Process(_) => Self::Connection(Errno::TIMEDOUT),
        }
    }
}
impl From<Errno> for Http {
    fn from(e: Errno) -> Self {
        match e {
            Errno::MSGSIZE => Self::Answer("with too much text".to_owned()),
            Errno::CONNRESET => Self::Answer("with half a page".to_owned()),
            e => Self::Connection(e),
        }
    }
}

fn fetch(address: SocketAddr, host: &str, path: &str) -> Result<Vec<u8>, Http> {
    let deadline = Deadline::after(WAIT);
    let mut connection = Connection::dial(address, deadline)?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: homeostat\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"
    );
    connection.send(request.as_bytes(), deadline)?;
    let status = String::from_utf8_lossy(&connection.line(LINE_MAX, deadline)?).into_owned();
    let mut words = status.split(' ');
    if !words.next().is_some_and(|v| v.starts_with("HTTP/1.")) {
        return Err(Http::Answer("with something that is not HTTP".to_owned()));
    }
    let code = words.next().unwrap_or_default();
    if code != "200" {
        let code: String = code.chars().filter(char::is_ascii_digit).take(3).collect();
        return Err(Http::Answer(format!("with status {code}")));
    }
    let mut length = None;
    let mut chunked = false;
    for n in 0.. {
        if n == HEADER_LINES_MAX {
            return Err(Http::Answer("with too many header lines".to_owned()));
        }
        let line = String::from_utf8_lossy(&connection.line(LINE_MAX, deadline)?).to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        match line.split_once(':').map(|(name, value)| (name, value.trim())) {
            Some(("content-length", value)) => {
                length = Some(
                    value
                        .parse::<usize>()
                        .map_err(|_| Http::Answer("with a bad length".to_owned()))?,
                );
            }
            Some(("transfer-encoding", value)) => chunked = value.contains("chunked"),
            Some(("content-encoding", value)) if value != "identity" => {
                return Err(Http::Answer("with a compressed page".to_owned()));
            }
            _ => {}
        }
    }
    if chunked {
        return chunks(&mut connection, deadline);
    }
    match length {
        Some(n) if n > BODY_MAX => Err(Http::Answer("with too much text".to_owned())),
        Some(n) => Ok(connection.exactly(n, deadline)?),
        None => Ok(connection.rest(BODY_MAX, deadline)?),
    }
}

/// A chunked body: each chunk follows its length in hexadecimal (RFC 9112, section 7.1).
pub(super) fn chunks(connection: &mut Connection, deadline: Deadline) -> Result<Vec<u8>, Http> {
    let mut body = Vec::new();
    loop {
        let line = String::from_utf8_lossy(&connection.line(LINE_MAX, deadline)?).into_owned();
        let size = line.split(';').next().unwrap_or_default().trim();
        let size =
            usize::from_str_radix(size, 16).map_err(|_| Http::Answer("with a broken chunk".to_owned()))?;
        if size == 0 {
            return Ok(body);
        }
        if size > BODY_MAX || body.len() + size > BODY_MAX {
            return Err(Http::Answer("with too much text".to_owned()));
        }
        body.extend(connection.exactly(size, deadline)?);
        if connection.exactly(2, deadline)? != b"\r\n" {
            return Err(Http::Answer("with a broken chunk".to_owned()));
        }
    }
}

/// Sum of all series of the metric whose labels include the given ones. `None`: there is no such series.
pub(super) fn sum_series(page: &str, metric: &str, labels: &[(String, String)]) -> Option<f64> {
    let mut sum = None;
    for line in page.lines() {
        let Some(rest) = line.strip_prefix(metric) else {
            continue;
        };
        // Another metric may begin with the same letters.
        let (has, value) = match rest.chars().next() {
            Some('{') => match parse_labels(rest) {
                Some(parsed) => parsed,
                None => continue,
            },
            Some(' ' | '\t') => (vec![], rest),
            _ => continue,
        };
        if !labels.iter().all(|l| has.contains(l)) {
            continue;
        }
        let number = value
            .split_ascii_whitespace()
            .next()
            .and_then(|v| v.parse::<f64>().ok());
        if let Some(number) = number.filter(|n| n.is_finite()) {
            *sum.get_or_insert(0.0) += number;
        }
    }
    sum
}

pub(super) fn parse_selector(text: &str) -> Option<(String, Vec<(String, String)>)> {
    let end = text.find('{').unwrap_or(text.len());
    let (name, labels) = text.split_at(end);
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    if name.is_empty() || !name.chars().all(good) {
        return None;
    }
    let labels = if labels.is_empty() {
        vec![]
    } else {
        let (labels, rest) = parse_labels(labels)?;
        if !rest.trim().is_empty() {
            return None;
        }
        labels
    };
    Some((name.to_owned(), labels))
}

/// `{name="value",…}` and the rest. Values may have `\\`, `\"` and `\n`.
fn parse_labels(text: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut rest = text.strip_prefix('{')?;
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_start().strip_prefix('"')?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    c => value.push(c),
                },
                (_, c) => value.push(c),
            }
        };
        labels.push((name.trim().to_owned(), value));
        rest = &after[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const PAGE: &str = "# HELP requests_total x\n# TYPE requests_total counter\n\
        requests_total{code=\"200\",path=\"/a,b}\\\"\"} 10\nrequests_total{code=\"500\"} 1.5e1 1700000000\n\
        requests_total_other 99\nrequests_total{code=\"200\"} NaN\nplain 7\nbroken{a=\"x 8\n";

    #[test]
    fn series_are_added() {
        let sum = |selector: &str| {
            let (m, l) = parse_selector(selector).unwrap();
            sum_series(PAGE, &m, &l)
        };
        assert_eq!(sum("requests_total"), Some(25.0));
        assert_eq!(sum("requests_total{code=\"200\"}"), Some(10.0));
        assert_eq!(sum("requests_total{path=\"/a,b}\\\"\"}"), Some(10.0));
        assert_eq!(sum("requests_total{code=\"404\"}"), None);
        assert_eq!(sum("plain"), Some(7.0));
        assert_eq!(sum("requests"), None);
        assert_eq!(sum("broken"), None);
        assert_eq!(parse_selector("a{b"), None);
        assert_eq!(parse_selector("a b"), None);
        assert_eq!(parse_selector(""), None);
    }

    #[test]
    fn ids_are_checked() {
        let root = Root::default();
        let ok = Series::parse(&root, "prometheus:http://127.0.0.1:9100/m?x=1#a{b=\"c\"}").unwrap();
        assert_eq!(
            (ok.address, ok.path.as_str()),
            ("127.0.0.1:9100".parse().unwrap(), "/m?x=1")
        );
        assert_eq!(
            Series::parse(&root, "prometheus:http://127.0.0.1#a")
                .unwrap()
                .path,
            "/metrics"
        );
        assert_eq!(
            Series::parse(&root, "prometheus:http://[::1]:90/#a")
                .unwrap()
                .address,
            "[::1]:90".parse().unwrap()
        );
        assert!(
            Series::parse(&root, "prometheus:http://localhost:1/#a")
                .unwrap()
                .address
                .ip()
                .is_loopback()
        );
        for bad in [
            "https://x#a",
            "http://127.0.0.1:1/",
            "http://nosuchname.invalid:1/#a",
            "http://127.0.0.1:x/#a",
            "http://127.0.0.1:1/a b#a",
            "http://127.0.0.1:1/a\r\nX: y#a",
            "http://127.0.0.1:1/#",
        ] {
            let e = Series::parse(&root, &format!("prometheus:{bad}"))
                .unwrap_err()
                .to_string();
            assert!(e.contains("write prometheus:http://"), "{e}");
        }
    }

    /// Serves one connection with these bytes, in pieces; keeps it open afterwards when told to.
    fn serve(pieces: Vec<Vec<u8>>, hang: bool) -> (SocketAddr, std::thread::JoinHandle<()>) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut s, _) = listener.accept().unwrap();
            let mut request = [0u8; 1024];
            let n = s.read(&mut request).unwrap();
            assert!(request[..n].starts_with(b"GET /metrics HTTP/1.1\r\n"));
            for piece in pieces {
                // The client may have enough and close.
                if s.write_all(&piece).is_err() {
                    return;
                }
            }
            if hang {
                // Until the client gives up.
                let _ = s.read(&mut request);
            }
        });
        (address, server)
    }

    fn ask(pieces: Vec<Vec<u8>>, hang: bool) -> Result<f64, PlatformError> {
        let (address, server) = serve(pieces, hang);
        let id = format!("prometheus:http://{address}/metrics#requests_total");
        let result = Series::parse(&Root::default(), &id).unwrap().read();
        server.join().unwrap();
        result
    }

    #[test]
    fn pages_of_every_form_are_read() {
        let plain = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{PAGE}", PAGE.len());
        assert_eq!(ask(vec![plain.into_bytes()], true), Ok(25.0));
        let closed = format!("HTTP/1.0 200 OK\r\nServer: x\r\n\r\n{PAGE}");
        assert_eq!(ask(vec![closed.into_bytes()], false), Ok(25.0));
        let (a, b) = PAGE.split_at(70);
        let chunked = vec![
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
            format!("{:x};note\r\n{a}\r\n", a.len()).into_bytes(),
            format!("{:X}\r\n{b}\r\n0\r\n\r\n", b.len()).into_bytes(),
        ];
        assert_eq!(ask(chunked, true), Ok(25.0));
    }

    #[test]
    fn bad_servers_are_refused_in_time() {
        let unsupported = |pieces: Vec<&str>| {
            let e = ask(pieces.into_iter().map(|p| p.as_bytes().to_vec()).collect(), false).unwrap_err();
            assert!(matches!(e, PlatformError::Unsupported { .. }), "{e}");
            e.to_string()
        };
        assert!(unsupported(vec!["HTTP/1.1 404 Not Found\r\n\r\n"]).contains("status 404"));
        assert!(unsupported(vec!["SSH-2.0-x\r\n"]).contains("not HTTP"));
        assert!(unsupported(vec![""]).contains("half a page"));
        assert!(
            unsupported(vec!["HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"]).contains("half a page")
        );
        assert!(
            unsupported(vec!["HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"]).contains("too much")
        );
        assert!(
            unsupported(vec!["HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"]).contains("compressed")
        );
        assert!(
            unsupported(vec![
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
            ])
            .contains("chunk")
        );
        assert!(unsupported(vec!["HTTP/1.1 200 OK\r\n\r\nother 1\n"]).contains("no such series"));
        let endless: Vec<Vec<u8>> = std::iter::once(b"HTTP/1.1 200 OK\r\n\r\n".to_vec())
            .chain((0..20).map(|_| vec![b'x'; 1024 * 1024]))
            .collect();
        // Too much, or too late on a slow machine: either way it ends.
        assert!(ask(endless, false).is_err());
    }

    #[test]
    fn a_server_that_hangs_is_busy_and_one_that_is_absent_unreachable() {
        assert!(matches!(ask(vec![], true), Err(PlatformError::Busy { .. })));
        let half = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc".to_vec();
        assert!(matches!(ask(vec![half], true), Err(PlatformError::Busy { .. })));
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let id = format!("prometheus:http://{address}/metrics#x");
        let e = Series::parse(&Root::default(), &id).unwrap().read().unwrap_err();
        assert!(matches!(e, PlatformError::Unsupported { .. }), "{e}");
    }
}

//! The endpoint that serves the metrics: loopback only, off unless `metrics.listen` is set.
//!
//! Every local user may read it, names of workloads included, so it is off by default. It serves one text and one
//! connection at a time, with limits on size and time. So no caller can make it grow or hold up the daemon. A local
//! user can keep others from the metrics, but from nothing else. A request for another host is refused: a web page's
//! own host name could otherwise point here.

use super::render;
use crate::board::Board;
use std::io::{ErrorKind, Read, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const REQUEST_BYTES_MAX: usize = 8 * 1024;
/// Most headers read; a scraper sends about six.
const HEADERS_MAX: usize = 64;
/// Time limit for a request: a scraper sends it at once, and a silent caller must not hold up the others.
const REQUEST_PATIENCE: Duration = Duration::from_millis(200);
/// Time limit for reading the answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);
const STACK_BYTES: usize = 256 * 1024;

/// Why the endpoint cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// Not an address, or not one of this machine alone.
    #[error("metrics.listen = {0:?} is not a loopback address with a port\n  hint: {hint}", hint = self.remedy())]
    Address(String),
    /// The address is taken, or may not be used.
    #[error("metrics can not be read at {address}: {source}\n  hint: {hint}", hint = self.remedy())]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
}

impl MetricsError {
    /// The remedy.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Address(_) => {
                "write \"127.0.0.1:9464\" or \"[::1]:9464\"; for other machines put a proxy of yours before it"
            }
            Self::Listen { .. } => "choose another port in metrics.listen, and start the daemon again",
        }
    }
}

/// The address of a setting; `None` when empty, which means off.
///
/// # Errors
/// [`MetricsError::Address`].
pub fn address(listen: &str) -> Result<Option<SocketAddr>, MetricsError> {
    if listen.is_empty() {
        return Ok(None);
    }
    listen
        .parse::<SocketAddr>()
        .ok()
        .filter(|a| a.ip().is_loopback())
        .map(Some)
        .ok_or_else(|| MetricsError::Address(listen.to_owned()))
}

/// The running endpoint.
pub struct Endpoint {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    serving: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens, and serves the board until dropped.
    ///
    /// # Errors
    /// The address cannot be used, or no thread could be started.
    pub fn start(address: SocketAddr, board: Arc<Board>) -> Result<Self, MetricsError> {
        let listen = |source| MetricsError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = stopping.clone();
        let serving = std::thread::Builder::new()
            .name("metrics".into())
            .stack_size(STACK_BYTES)
            .spawn(move || serve(&listener, &board, &stop))
            .map_err(listen)?;
        Ok(Self {
            address,
            stopping,
            serving: Some(serving),
        })
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Ends a blocked accept().
        let _ = TcpStream::connect_timeout(&self.address, ANSWER_PATIENCE);
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}

fn serve(listener: &TcpListener, board: &Board, stopping: &AtomicBool) {
    while !stopping.load(Ordering::SeqCst) {
        match listener.accept() {
            Ok((stream, _)) if !stopping.load(Ordering::SeqCst) => {
                let _ = answer(stream, board);
            }
            Ok(_) => return,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            // Probably out of file descriptors: wait for closings instead of spinning.
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}

fn answer(mut stream: TcpStream, board: &Board) -> std::io::Result<()> {
    stream.set_write_timeout(Some(ANSWER_PATIENCE))?;
    let request = read_request(&mut stream)?;
    let (code, content_type, body) = match judge(&request) {
        Ok(()) => ("200 OK", CONTENT_TYPE, render(&board.status())),
        Err(refusal) => (refusal, "text/plain", format!("{refusal}\n")),
    };
    let head = format!(
        "HTTP/1.1 {code}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.shutdown(Shutdown::Write)
}

fn read_request(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let deadline = Instant::now() + REQUEST_PATIENCE;
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while request.len() < REQUEST_BYTES_MAX && !request.windows(4).any(|w| w == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let read = stream.read(&mut part)?;
        if read == 0 {
            break;
        }
        request.extend_from_slice(&part[..read]);
    }
    Ok(request)
}

/// `Err`: the status line of the refusal.
fn judge(request: &[u8]) -> Result<(), &'static str> {
    const BAD: &str = "400 Bad Request";
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    if !matches!(parsed.parse(request), Ok(httparse::Status::Complete(_))) {
        return Err(BAD);
    }
    if parsed.method != Some("GET") {
        return Err("405 Method Not Allowed");
    }
    let mut hosts = parsed
        .headers
        .iter()
        .filter(|h| h.name.eq_ignore_ascii_case("host"))
        .map(|h| std::str::from_utf8(h.value).unwrap_or_default());
    // Exactly one (RFC 9112, section 3.2): of two, each reader would believe another.
    match (hosts.next(), hosts.next()) {
        (Some(host), None) if is_this_machine(host.trim()) => {}
        _ => return Err("421 Misdirected Request"),
    }
    match parsed.path.and_then(|p| p.split('?').next()) {
        Some("/metrics") => Ok(()),
        _ => Err("404 Not Found: the metrics are at /metrics"),
    }
}

/// Whether the host, with or without a port, is a loopback address or `localhost`.
fn is_this_machine(host: &str) -> bool {
    if let Ok(address) = host.parse::<SocketAddr>() {
        return address.ip().is_loopback();
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() => name,
        _ => host,
    };
    let bare = name
        .strip_prefix('[')
        .and_then(|n| n.strip_suffix(']'))
        .unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_may_listen_and_be_asked() {
        assert_eq!(address("").unwrap(), None);
        assert!(address("127.0.0.1:9464").unwrap().is_some());
        assert!(address("[::1]:9464").unwrap().is_some());
        for wrong in [
            "0.0.0.0:9464",
            "192.0.2.1:9464",
            "localhost:9464",
            "9464",
            "[::]:1",
            "127.0.0.1",
        ] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
        for (host, ours) in [
            ("127.0.0.1:9464", true),
            ("127.0.0.1", true),
            ("localhost:9464", true),
            ("LOCALHOST", true),
            ("[::1]:9464", true),
            ("evil.example:9464", false),
            ("127.0.0.1.evil.example", false),
            ("192.0.2.1:9464", false),
            ("", false),
        ] {
            assert_eq!(is_this_machine(host), ours, "{host}");
        }
    }

    #[test]
    fn only_the_one_text_is_served() {
        let get = |line: &str| judge(format!("{line}\r\nHost: localhost\r\n\r\n").as_bytes());
        assert_eq!(get("GET /metrics HTTP/1.1"), Ok(()));
        assert_eq!(judge(b"GET /metrics HTTP/1.1\r\nhOST: [::1]:1\r\n\r\n"), Ok(()));
        assert_eq!(get("GET /metrics?x=1 HTTP/1.1"), Ok(()));
        assert_eq!(
            get("GET /etc/passwd HTTP/1.1"),
            Err("404 Not Found: the metrics are at /metrics")
        );
        assert_eq!(get("POST /metrics HTTP/1.1"), Err("405 Method Not Allowed"));
        assert_eq!(
            judge(b"GET /metrics HTTP/1.1\r\n\r\n"),
            Err("421 Misdirected Request")
        );
        assert_eq!(
            judge(b"GET /metrics HTTP/1.1\r\nHost: a.b\r\n\r\n"),
            Err("421 Misdirected Request")
        );
        let two = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: a.b\r\n\r\n";
        assert_eq!(judge(two), Err("421 Misdirected Request"));
        assert_eq!(judge(b"\xff\r\n\r\n"), Err("400 Bad Request"));
        assert_eq!(judge(b"GET /metrics"), Err("400 Bad Request"));
    }

    #[test]
    fn it_answers_over_a_connection_and_ends() {
        let endpoint = Endpoint::start("127.0.0.1:0".parse().unwrap(), Arc::new(Board::default())).unwrap();
        let ask = |request: &str| {
            let mut stream = TcpStream::connect(endpoint.address()).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
        let answer = ask("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n"),
            "{answer}"
        );
        assert!(ask(&format!("GET /{} HTTP/1.1\r\n", "x".repeat(20_000))).starts_with("HTTP/1.1 400"));
        drop(endpoint);
    }
}

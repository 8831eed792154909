//! Tells systemd how we are, over the socket it names in the environment (sd_notify(3)).

use homeostat_engine::Status;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager, if there is one.
pub struct Manager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// The last status sent.
    said: String,
    /// How often it wants to hear from us.
    pub watchdog: Option<Duration>,
}

impl Manager {
    /// Without a listener.
    pub fn none() -> Self {
        Self {
            socket: None,
            said: String::new(),
            watchdog: None,
        }
    }

    /// The manager that the environment names.
    pub fn from_environment() -> Self {
        let address = std::env::var_os("NOTIFY_SOCKET").and_then(|name| {
            let bytes = name.as_bytes();
            match bytes.strip_prefix(b"@") {
                Some(name) => SocketAddr::from_abstract_name(name).ok(),
                None => SocketAddr::from_pathname(&name).ok(),
            }
        });
        // WATCHDOG_PID may name another process.
        let for_us = std::env::var("WATCHDOG_PID").map_or(true, |pid| pid == std::process::id().to_string());
        let period = std::env::var("WATCHDOG_USEC")
            .ok()
            .and_then(|us| us.parse::<u64>().ok());
        Self {
            socket: address.and_then(|a| UnixDatagram::unbound().ok().map(|s| (s, a))),
            said: String::new(),
            // sd_watchdog_enabled(3) recommends half of the period.
            watchdog: period
                .filter(|us| for_us && *us > 0)
                .map(|us| Duration::from_micros(us / 2)),
        }
    }

    /// Sends a message such as `READY=1`, and says whether it was taken. A missing listener is no error.
    pub fn tell(&self, message: &str) -> bool {
        self.socket
            .as_ref()
            .is_some_and(|(socket, address)| socket.send_to_addr(message.as_bytes(), address).is_ok())
    }

    /// Says in one line how we are, for `systemctl status`; nothing when that is what was said last.
    pub fn tell_state(&mut self, view: &Status) {
        if self.socket.is_none() {
            return;
        }
        let line = state(view);
        // Repeat next time if not taken.
        if line != self.said && self.tell(&format!("STATUS={line}")) {
            self.said = line;
        }
    }
}

/// The state in one line: numbers only, so that it holds no text chosen by a workload.
fn state(view: &Status) -> String {
    let measured = view.workloads.iter().filter(|w| w.meter.is_some()).count();
    let doing = if view.paused { "paused" } else { view.mode.as_str() };
    format!(
        "{doing}; workloads measured: {measured}, trials running: {}, changes in force: {}",
        view.experiments.len(),
        view.in_force.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let mut manager = Manager {
            socket: Some((
                UnixDatagram::unbound().unwrap(),
                SocketAddr::from_pathname(&path).unwrap(),
            )),
            said: String::new(),
            watchdog: None,
        };
        manager.tell("READY=1");
        let mut buffer = [0; 64];
        let n = receiver.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"READY=1");
        let mut view = Status {
            mode: "act".into(),
            ..Status::default()
        };
        let mut buffer = [0; 200];
        manager.tell_state(&view);
        let n = receiver.recv(&mut buffer).unwrap();
        let all_idle = "STATUS=act; workloads measured: 0, trials running: 0, changes in force: 0";
        assert_eq!(std::str::from_utf8(&buffer[..n]).unwrap(), all_idle);
        // What has not changed is not said again: the next message is of another state.
        manager.tell_state(&view);
        view.paused = true;
        manager.tell_state(&view);
        let n = receiver.recv(&mut buffer).unwrap();
        assert!(buffer[..n].starts_with(b"STATUS=paused;"));
    }
}

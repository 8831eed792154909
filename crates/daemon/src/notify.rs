//! Tells systemd how we are, over the socket it names in the environment (sd_notify(3)).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager, if there is one.
pub struct Manager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// How often it wants to hear from us.
    pub watchdog: Option<Duration>,
}

impl Manager {
    /// Nobody to tell.
    pub fn none() -> Self {
        Self {
            socket: None,
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
        // WATCHDOG_PID names the process that is meant, if any.
        let for_us = std::env::var("WATCHDOG_PID").map_or(true, |pid| pid == std::process::id().to_string());
        let period = std::env::var("WATCHDOG_USEC")
            .ok()
            .and_then(|us| us.parse::<u64>().ok());
        Self {
            socket: address.and_then(|a| UnixDatagram::unbound().ok().map(|s| (s, a))),
            // sd_watchdog_enabled(3) recommends half of the period.
            watchdog: period
                .filter(|us| for_us && *us > 0)
                .map(|us| Duration::from_micros(us / 2)),
        }
    }

    /// Sends a message such as `READY=1`. Nobody listening is no error.
    pub fn tell(&self, message: &str) {
        if let Some((socket, address)) = &self.socket {
            let _ = socket.send_to_addr(message.as_bytes(), address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let manager = Manager {
            socket: Some((
                UnixDatagram::unbound().unwrap(),
                SocketAddr::from_pathname(&path).unwrap(),
            )),
            watchdog: None,
        };
        manager.tell("READY=1");
        let mut buffer = [0; 64];
        let n = receiver.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"READY=1");
    }
}

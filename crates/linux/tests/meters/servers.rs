//! Real servers, started on sockets in a directory of their own, and ended with the test.

use super::*;
use std::io::Read;
use std::os::unix::net::UnixStream;

struct Server {
    child: Child,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(name: &str, arguments: impl Fn(&Path) -> Vec<String>) -> Option<Self> {
        let program = installed(name)?;
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let child = Command::new(program)
            .args(arguments(&socket))
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self {
            child,
            socket,
            _directory: directory,
        };
        let start = Instant::now();
        while UnixStream::connect(&server.socket).is_err() {
            assert!(start.elapsed() < PATIENCE, "{name} does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(server)
    }

    fn redis(more: &[&str]) -> Option<Self> {
        let more: Vec<String> = more.iter().map(|s| (*s).to_owned()).collect();
        Self::start("redis-server", |socket| {
            let mut a: Vec<String> = ["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]
                .map(str::to_owned)
                .into();
            a.push(socket.to_string_lossy().into_owned());
            a.extend(more.iter().cloned());
            a
        })
    }

    /// A program name that `is_program` knows, whatever the executable is called.
    fn workload(&self, name: &str) -> Workload {
        workload(name, &[self.child.id()])
    }
}

/// Sends a text command so many times, each answered before the next.
fn converse(socket: &Path, command: &[u8], answer: &[u8], times: usize) {
    let mut s = UnixStream::connect(socket).unwrap();
    let mut buffer = vec![0u8; answer.len()];
    for _ in 0..times {
        s.write_all(command).unwrap();
        s.read_exact(&mut buffer).unwrap();
        assert_eq!(buffer, answer);
    }
}

#[test]
fn commands_of_a_redis_are_counted_exactly() {
    let Some(server) = Server::redis(&[]) else { return };
    let w = server.workload("redis-server");
    let mut meters = Meters::plain();
    assert_eq!(meters.lasting_refusal(&w, "redis"), "");
    let mut m = meters.open_patiently(&w, "redis").unwrap();
    let before = reading(&mut *m, &w).unwrap();
    assert_eq!(
        reading(&mut *m, &w).unwrap(),
        before,
        "our own questions are not work"
    );
    converse(&server.socket, b"PING\r\n", b"+PONG\r\n", 3000);
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 3000.0);
    for _ in 0..5 {
        assert_eq!(reading(&mut *m, &w).unwrap() - before, 3000.0);
    }
    converse(&server.socket, b"SET a 1\r\n", b"+OK\r\n", 17);
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 3017.0);
}

#[test]
fn a_redis_that_drops_our_connection_is_asked_again() {
    let Some(server) = Server::redis(&[]) else { return };
    let w = server.workload("redis-server");
    let mut m = Meters::plain().open_patiently(&w, "redis").unwrap();
    let before = reading(&mut *m, &w).unwrap();
    // Closes every other client; counts as one command.
    converse(&server.socket, b"CLIENT KILL TYPE normal\r\n", b":1\r\n", 1);
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 1.0);
    converse(&server.socket, b"PING\r\n", b"+PONG\r\n", 10);
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 11.0);
}

#[test]
fn a_redis_over_tcp_is_found() {
    let Some(program) = installed("redis-server") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let child = Command::new(program)
        .args([
            "--port",
            &address.port().to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ])
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server {
        child,
        socket: PathBuf::new(),
        _directory: dir,
    };
    let start = Instant::now();
    let mut client = loop {
        match std::net::TcpStream::connect(address) {
            Ok(c) => break c,
            Err(_) => assert!(start.elapsed() < PATIENCE, "redis does not start"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let w = server.workload("redis-server");
    let mut meters = Meters::plain();
    let mut m = meters.open_patiently(&w, "redis").unwrap();
    let mut bytes = meters.open_patiently(&w, "sockets.segments").unwrap();
    let before = (reading(&mut *m, &w).unwrap(), reading(&mut *bytes, &w).unwrap());
    let mut answer = [0u8; 7];
    for _ in 0..200 {
        client.write_all(b"PING\r\n").unwrap();
        client.read_exact(&mut answer).unwrap();
    }
    assert_eq!(reading(&mut *m, &w).unwrap() - before.0, 200.0);
    // 200 questions and those of the meter above (its socket is of this server as well): two, some more where the server was late.
    let segments = reading(&mut *bytes, &w).unwrap() - before.1;
    assert!((200.0..300.0).contains(&segments), "{segments}");
}

#[test]
fn a_redis_with_a_password_wants_a_file() {
    use std::os::unix::fs::PermissionsExt;
    let Some(server) = Server::redis(&["--requirepass", "hunter2"]) else {
        return;
    };
    let w = server.workload("redis-server");
    let why = Meters::plain().lasting_refusal(&w, "redis");
    assert!(why.contains("redis_password_files"), "{why}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, "wrong\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let mut settings = MeterSettings::default();
    settings
        .redis_password_files
        .insert("redis-*".to_owned(), file.clone());
    let mut meters = Meters::new(&settings);
    let why = meters.lasting_refusal(&w, "redis");
    assert!(why.contains("correct the password"), "{why}");
    std::fs::write(&file, "hunter2\n").unwrap();
    let mut m = meters.open_patiently(&w, "redis").unwrap();
    let before = reading(&mut *m, &w).unwrap();
    assert_eq!(reading(&mut *m, &w).unwrap(), before);
    converse(&server.socket, b"AUTH hunter2\r\n", b"+OK\r\n", 5);
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 5.0);
}

#[test]
fn a_stopped_redis_is_busy_and_an_ended_one_gone() {
    let Some(server) = Server::redis(&[]) else { return };
    let w = server.workload("redis-server");
    let mut m = Meters::plain().open_patiently(&w, "redis").unwrap();
    reading(&mut *m, &w).unwrap();
    let pid = server.child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-STOP", &pid])
            .status()
            .unwrap()
            .success()
    );
    let stopped = m.read(&w);
    assert!(
        Command::new("kill")
            .args(["-CONT", &pid])
            .status()
            .unwrap()
            .success()
    );
    assert!(matches!(stopped, Err(PlatformError::Busy { .. })), "{stopped:?}");
    // It goes on afterwards, with the late answer thrown away with its connection.
    let start = Instant::now();
    while m.read(&w).is_err() {
        assert!(start.elapsed() < PATIENCE);
    }
    drop(server);
    assert!(matches!(
        reading(&mut *m, &w),
        Err(PlatformError::Vanished { .. })
    ));
}

#[test]
fn operations_of_a_memcached_are_counted_exactly() {
    let arguments = |socket: &Path| {
        let mut a = vec!["-s".to_owned(), socket.to_string_lossy().into_owned()];
        if is_root() {
            a.extend(["-u".to_owned(), "root".to_owned()]);
        }
        a
    };
    let Some(server) = Server::start("memcached", arguments) else {
        return;
    };
    let w = server.workload("memcached");
    let mut meters = Meters::plain();
    assert_eq!(meters.lasting_refusal(&w, "memcached"), "");
    let mut m = meters.open_patiently(&w, "memcached").unwrap();
    let before = reading(&mut *m, &w).unwrap();
    converse(&server.socket, b"set a 0 0 1\r\n1\r\n", b"STORED\r\n", 100);
    converse(&server.socket, b"get a\r\n", b"VALUE a 0 1\r\n1\r\nEND\r\n", 1000);
    converse(&server.socket, b"incr a 0\r\n", b"1\r\n", 10);
    converse(&server.socket, b"delete b\r\n", b"NOT_FOUND\r\n", 1);
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 1111.0);
}

#[test]
fn a_server_that_is_none_is_refused_in_time() {
    // This process, under the name of a redis, with a socket that never answers and one that answers nonsense.
    let dir = tempfile::tempdir().unwrap();
    let silent = std::os::unix::net::UnixListener::bind(dir.path().join("a")).unwrap();
    let w = workload("redis-server", &[std::process::id()]);
    let start = Instant::now();
    let why = Meters::plain().refusal(&w, "redis");
    assert!(!why.is_empty());
    assert!(start.elapsed() < Duration::from_secs(30), "bounded");
    drop(silent);
}

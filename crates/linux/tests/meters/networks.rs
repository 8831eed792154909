//! Programs in a network namespace of their own, as in most containers: their connections are counted, and their servers
//! asked, in there. Made and entered by root only.

use super::*;
use rustix::fs::{Mode, OFlags};
use rustix::thread::{
    CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space, set_capabilities,
};
use std::io::Read;
use std::net::TcpStream;
use std::os::fd::AsFd;

/// Talks to itself over TCP in a network of its own: `t7` has seven questions of 100 bytes answered by 10 bytes each. Whoever
/// connects is told their number as a memcached tells it. With arguments it only becomes that program there.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static int fail(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    return 1;
}

int main(int argc, char **argv)
{
    char line[64], block[128] = {0}, answer[128];
    struct ifreq lo;
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    int listener, client, server, asker = -1;
    unsigned long turns = 0;
    if (unshare(CLONE_NEWNET) != 0)
        return fail("unshare");
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&lo, 0, sizeof lo);
    strcpy(lo.ifr_name, "lo");
    lo.ifr_flags = IFF_UP | IFF_RUNNING;
    if (listener < 0 || ioctl(listener, SIOCSIFFLAGS, &lo) != 0)
        return fail("lo");
    if (argc > 1) {
        execv(argv[1], argv + 1);
        return fail(argv[1]);
    }
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 8) != 0
        || getsockname(listener, (struct sockaddr *)&at, &size) != 0)
        return fail("listen");
    client = socket(AF_INET, SOCK_STREAM, 0);
    if (client < 0 || connect(client, (struct sockaddr *)&at, sizeof at) != 0)
        return fail("connect");
    server = accept(listener, NULL, NULL);
    if (server < 0)
        return fail("accept");
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct pollfd fds[3] = {{0, POLLIN, 0}, {listener, POLLIN, 0}, {asker, POLLIN, 0}};
        if (poll(fds, 3, -1) < 0)
            return 1;
        if (fds[2].revents) {
            int n = 0;
            if (read(asker, answer, sizeof answer) > 0)
                n = snprintf(answer, sizeof answer, "STAT cmd_get %lu\r\nEND\r\n", turns);
            if (n == 0 || write(asker, answer, (size_t)n) != n) {
                close(asker);
                asker = -1;
            }
        }
        if (fds[1].revents) {
            if (asker >= 0)
                close(asker);
            asker = accept(listener, NULL, NULL);
        }
        if (fds[0].revents) {
            unsigned long i, n;
            if (!fgets(line, sizeof line, stdin))
                return 0;
            n = strtoul(line + 1, NULL, 10);
            for (i = 0; i < n; i++) {
                if (write(client, block, 100) != 100 || recv(server, block, 100, MSG_WAITALL) != 100
                    || write(server, block, 10) != 10 || recv(client, block, 10, MSG_WAITALL) != 10)
                    return 1;
                turns++;
            }
            printf("done\n");
            fflush(stdout);
        }
    }
}
"#;

/// The program, compiled; `None`, with a printed reason, where it is of no use.
fn program(directory: &Path) -> Option<PathBuf> {
    if !is_root() {
        println!("skipped: only root may make a network namespace, and enter it");
        return None;
    }
    compile(directory, "talker", PROGRAM, &["-O2"])
}

/// The program that talks to itself; `None`, with a printed reason, where no network can be had.
fn talker(directory: &Path) -> Option<Servant> {
    let mut talker = Servant::start(&mut Command::new(program(directory)?));
    let answer = talker.answer();
    if answer == "ready" {
        return Some(talker);
    }
    println!("skipped: no network namespace can be had here: {answer}");
    None
}

#[test]
fn connections_in_another_network_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut talker) = talker(dir.path()) else {
        return;
    };
    let w = workload("talker", &[talker.pid()]);
    let ours = std::fs::read_link("/proc/self/ns/net").unwrap();
    let mut meters = Meters::plain();
    assert_eq!(meters.lasting_refusal(&w, "sockets.segments"), "");
    let mut segments = meters.open_patiently(&w, "sockets.segments").unwrap();
    let mut bytes = meters.open_patiently(&w, "sockets.bytes").unwrap();
    let before = (
        reading(&mut *segments, &w).unwrap(),
        reading(&mut *bytes, &w).unwrap(),
    );
    assert_eq!(talker.order("t300"), "done");
    // At both ends, which are the workload's.
    assert_eq!(reading(&mut *segments, &w).unwrap() - before.0, 600.0);
    let begun = Instant::now();
    loop {
        let counted = reading(&mut *bytes, &w).unwrap() - before.1;
        if counted == 300.0 * 220.0 {
            break;
        }
        // The last answer is acknowledged a little later.
        assert!(counted == 300.0 * 220.0 - 10.0, "{counted}");
        assert!(begun.elapsed() < PATIENCE, "{counted}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let here = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    assert_eq!(here, ours, "we have not left ours");
    assert_eq!(std::fs::read_link("/proc/self/ns/net").unwrap(), ours);
    // With the process goes its network.
    drop(talker);
    for meter in [&mut segments, &mut bytes] {
        assert!(matches!(
            reading(&mut **meter, &w),
            Err(PlatformError::Vanished { .. })
        ));
    }
    assert!(
        meters
            .lasting_refusal(&w, "sockets.segments")
            .contains("no longer exists")
    );
}

#[test]
fn a_server_in_another_network_is_asked_there_but_not_told_a_password() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut talker) = talker(dir.path()) else {
        return;
    };
    let w = workload("memcached", &[talker.pid()]);
    let mut meters = Meters::plain();
    assert_eq!(meters.lasting_refusal(&w, "memcached"), "");
    let mut m = meters.open_patiently(&w, "memcached").unwrap();
    let before = reading(&mut *m, &w).unwrap();
    assert_eq!(talker.order("t40"), "done");
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 40.0);
    assert_eq!(talker.order("t2"), "done");
    assert_eq!(reading(&mut *m, &w).unwrap() - before, 42.0);

    let mut settings = MeterSettings::default();
    let file = dir.path().join("password");
    settings.redis_password_files.insert("redis-*".to_owned(), file);
    let why = Meters::new(&settings).lasting_refusal(&workload("redis-server", &[talker.pid()]), "redis");
    assert!(
        why.contains("not told in another network namespace") && why.contains("unixsocket"),
        "{why}"
    );
    drop(talker);
    assert!(reading(&mut *m, &w).is_err());
}

#[test]
fn who_may_not_enter_a_network_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let Some(talker) = talker(dir.path()) else { return };
    // (Servers are asked by a helper process, which has its own capabilities.)
    let w = workload("talker", &[talker.pid()]);
    // What a thread gives up the others keep.
    let why = std::thread::spawn(move || {
        let mut sets = capabilities(None).unwrap();
        if !sets.effective.contains(CapabilitySet::SYS_PTRACE) {
            println!("skipped: without CAP_SYS_PTRACE the network is not even seen");
            return None;
        }
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets).unwrap();
        let mut meters = Meters::plain();
        Some(meters.lasting_refusal(&w, "sockets.segments"))
    })
    .join()
    .unwrap();
    if let Some(why) = why {
        assert!(
            why.contains("network namespace") && why.contains("CAP_SYS_ADMIN"),
            "{why}"
        );
    }
}

/// Does something in the network of that process.
fn inside<T: Send + 'static>(pid: u32, action: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::spawn(move || {
        let name = format!("/proc/{pid}/ns/net");
        let network = rustix::fs::open(name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        action()
    })
    .join()
    .unwrap()
}

#[test]
fn a_redis_in_another_network_is_found() {
    let Some(redis) = installed("redis-server") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = program(dir.path()) else {
        return;
    };
    // Nobody else is in that network: any port is free.
    let address = "127.0.0.1:6379";
    let mut command = Command::new(program);
    command
        .arg(redis)
        .args(["--port", "6379", "--bind", "127.0.0.1", "--save", ""]);
    let mut server = Servant::start(command.current_dir(dir.path()));
    let pid = server.pid();
    let ours = std::fs::read_link("/proc/self/ns/net").unwrap();
    let begun = Instant::now();
    let mut client = loop {
        if let Some(status) = server.child.try_wait().unwrap() {
            println!(
                "skipped: no redis in a network namespace here: {status}: {}",
                server.answer()
            );
            return;
        }
        let theirs = std::fs::read_link(format!("/proc/{pid}/ns/net"));
        if theirs.is_ok_and(|theirs| theirs != ours) {
            // A socket stays in the network in which it was made.
            if let Ok(client) = inside(pid, move || TcpStream::connect(address)) {
                break client;
            }
        }
        assert!(begun.elapsed() < PATIENCE, "redis does not start");
        std::thread::sleep(Duration::from_millis(10));
    };
    let w = workload("redis-server", &[pid]);
    let mut meters = Meters::plain();
    let mut m = meters.open_patiently(&w, "redis").unwrap();
    let mut segments = meters.open_patiently(&w, "sockets.segments").unwrap();
    let before = (
        reading(&mut *m, &w).unwrap(),
        reading(&mut *segments, &w).unwrap(),
    );
    let mut answer = [0u8; 7];
    for _ in 0..200 {
        client.write_all(b"PING\r\n").unwrap();
        client.read_exact(&mut answer).unwrap();
    }
    assert_eq!(reading(&mut *m, &w).unwrap() - before.0, 200.0);
    // And the questions of the meter above, some more where the server was late.
    let counted = reading(&mut *segments, &w).unwrap() - before.1;
    assert!((200.0..300.0).contains(&counted), "{counted}");
}

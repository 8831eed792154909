//! Counts of the kernel against a program that does a known number of calls.

use super::*;

const PROGRAM: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int main(void)
{
    char line[64], block[100] = {0};
    int null = open("/dev/null", O_WRONLY);
    while (fgets(line, sizeof line, stdin)) {
        unsigned long i, n = strtoul(line + 1, NULL, 10);
        struct timespec t = {0, 1000};
        for (i = 0; i < n; i++) {
            if (line[0] == 'w' && write(null, block, sizeof block) != sizeof block)
                return 1;
            if (line[0] == 's')
                nanosleep(&t, NULL);
        }
        printf("done\n");
        fflush(stdout);
    }
    return 0;
}
"#;

#[test]
fn writes_and_sleeps_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile(dir.path(), "caller", PROGRAM, &["-O2"]) else {
        return;
    };
    let mut c = Servant::start(&mut Command::new(program));
    assert_eq!(c.order("w0"), "done");
    let w = workload("caller", &[c.pid()]);
    let mut meters = Meters::plain();
    let mut calls = meters.open(&w, "io.write_calls").unwrap();
    let mut bytes = meters.open(&w, "io.bytes").unwrap();
    let mut switches = meters.open(&w, "switches.voluntary").unwrap();
    let read = |m: &mut Box<dyn Meter>| m.read(&w).unwrap();
    let before = [read(&mut calls), read(&mut bytes), read(&mut switches)];
    assert_eq!(c.order("w1000"), "done");
    // The answer itself is one write call of five bytes, the order one read call of six bytes.
    assert_eq!(read(&mut calls) - before[0], 1001.0);
    assert_eq!(read(&mut bytes) - before[1], 100_000.0 + 5.0 + 6.0);
    assert_eq!(c.order("s50"), "done");
    let slept = read(&mut switches) - before[2];
    // One that ends before the scheduler has looked, on a busy machine, is no switch.
    assert!(slept >= 45.0, "{slept} voluntary switches in 50 sleeps");
    drop(c);
    assert!(matches!(calls.read(&w), Err(PlatformError::Vanished { .. })));
}

#[test]
fn processor_counters_count_or_say_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile(dir.path(), "caller", PROGRAM, &["-O2"]) else {
        return;
    };
    let mut c = Servant::start(&mut Command::new(program));
    assert_eq!(c.order("w0"), "done");
    let w = workload("caller", &[c.pid()]);
    let mut meters = Meters::plain();
    let why = meters.refusal(&w, "instructions");
    if why.is_empty() {
        let mut m = meters.open(&w, "instructions").unwrap();
        let before = m.read(&w).unwrap();
        assert_eq!(c.order("w1000"), "done");
        assert!(m.read(&w).unwrap() > before + 1000.0);
    } else {
        println!("refused here: {why}");
        assert!(why.contains("PMU") || why.contains("root"), "{why}");
        assert!(meters.open(&w, "instructions").is_err());
    }
}

/// Orders: `m` sends a message and takes it, `w` does so by `write` and `read`, `p` looks at one that waits, `e` asks where there is none,
/// `g` does nothing but ask who its parent is.
const TALKER: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
static int pair[2];
static char line[64], block[100];
static void *answer(void *p)
{
    unsigned long i, n = strtoul(line + 1, NULL, 10);
    for (i = 0; i < n; i++) {
        if (line[0] == 'm' && (send(pair[0], block, 10, 0) != 10 || recv(pair[1], block, 10, 0) != 10))
            exit(1);
        if (line[0] == 'w' && (write(pair[0], block, 10) != 10 || read(pair[1], block, 10) != 10))
            exit(1);
        if (line[0] == 'p' && recv(pair[1], block, 10, MSG_PEEK | MSG_DONTWAIT) != 10)
            exit(1);
        if (line[0] == 'e' && recv(pair[1], block, 10, MSG_DONTWAIT) != -1)
            exit(1);
        if (line[0] == 'g' && getppid() == 0)
            exit(1);
    }
    return p;
}
int main(void)
{
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        return 1;
    while (fgets(line, sizeof line, stdin)) {
        if (line[0] == 't') {
            /* In a thread that is made while it is counted. */
            pthread_t thread;
            line[0] = 'm';
            if (pthread_create(&thread, NULL, answer, NULL) != 0 || pthread_join(thread, NULL) != 0)
                return 1;
        } else if (line[0] == 'p') {
            if (send(pair[0], block, 10, 0) != 10)
                return 1;
            answer(NULL);
            if (recv(pair[1], block, 10, 0) != 10)
                return 1;
        } else {
            answer(NULL);
        }
        printf("done\n");
        fflush(stdout);
    }
    return 0;
}
"#;

#[test]
fn messages_are_counted_that_carried_something_or_it_is_said_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile(dir.path(), "talker", TALKER, &["-O2", "-pthread"]) else {
        return;
    };
    let mut c = Servant::start(&mut Command::new(program));
    assert_eq!(c.order("m0"), "done");
    let w = workload("talker", &[c.pid()]);
    let mut meters = Meters::plain();
    let why = meters.refusal(&w, "messages.sent");
    if !why.is_empty() {
        println!("refused here: {why}");
        assert!(why.contains("Linux 6.3") || why.contains("root") || why.contains("namespace"));
        return;
    }
    let mut sent = meters.open(&w, "messages.sent").unwrap();
    let mut received = meters.open(&w, "messages.received").unwrap();
    let (deadline, ready) = (
        Instant::now() + Duration::from_secs(10),
        |m: &mut Box<dyn Meter>| m.read(&w).is_ok(),
    );
    while !(ready(&mut sent) && ready(&mut received)) {
        assert!(Instant::now() < deadline, "counting does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut seen = |c: &mut Servant, order: &str| {
        let before = (sent.read(&w).unwrap(), received.read(&w).unwrap());
        assert_eq!(c.order(order), "done");
        (
            sent.read(&w).unwrap() - before.0,
            received.read(&w).unwrap() - before.1,
        )
    };
    assert_eq!(seen(&mut c, "m321"), (321.0, 321.0));
    assert_eq!(
        seen(&mut c, "w45"),
        (45.0, 45.0),
        "however they are sent and received"
    );
    assert_eq!(seen(&mut c, "t67"), (67.0, 67.0), "by a thread that is new");
    // The one that was looked at is taken in the end.
    assert_eq!(seen(&mut c, "p89"), (1.0, 1.0), "looked at and not taken");
    assert_eq!(seen(&mut c, "e10"), (0.0, 0.0), "nothing was there");
    assert_eq!(seen(&mut c, "g10"), (0.0, 0.0), "other calls");
}

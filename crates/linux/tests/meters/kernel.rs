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

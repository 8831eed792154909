//! Small kernel queries without a wrapper in the libraries.

/// CPU time of all threads of a process, also ended ones (ns). Needs no permission or file (`clock_getcpuclockid(3)`).
pub fn process_cpu_time(pid: i32) -> Option<u64> {
    /// `PID_MAX_LIMIT` of include/linux/threads.h; larger numbers would not fit the encoding below.
    const PID_MAX: i32 = 1 << 22;
    if !(1..=PID_MAX).contains(&pid) {
        return None;
    }
    // The kernel's encoding (include/linux/posix-timers_types.h): CPUCLOCK_SCHED = 2, bit 2 clear for the thread group.
    let clock: libc::clockid_t = (!pid << 3) | 2;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid place for one timespec; any value is allowed as clock id.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    let seconds = u64::try_from(time.tv_sec).ok()?;
    seconds
        .checked_mul(1_000_000_000)?
        .checked_add(u64::try_from(time.tv_nsec).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_time_grows_and_absent_processes_have_none() {
        let own = std::process::id() as i32;
        let before = process_cpu_time(own).unwrap();
        let mut x = 0u64;
        for i in 0..2_000_000u64 {
            x = std::hint::black_box(x ^ i);
        }
        assert!(process_cpu_time(own).unwrap() > before, "{x}");
        assert_eq!(process_cpu_time(0), None);
        assert_eq!(process_cpu_time(i32::MAX), None);
    }
}

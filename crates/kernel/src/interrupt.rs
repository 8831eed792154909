//! Ends a system call of our own thread that takes too long.

use std::sync::OnceLock;

/// The signal. It has no other meaning here: without a handler it is ignored, and sockets send it only on request.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Does nothing: the mere existence of a handler ends the call.
extern "C" fn arrived(_: libc::c_int) {}

/// The number of the calling thread, for [`interrupt`].
pub fn own_number() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Interrupts a thread of this process, if it exists: its system call ends with `EINTR` if it checks for signals.
pub fn interrupt(thread: i32) {
    static HANDLER: OnceLock<bool> = OnceLock::new();
    let is_there = HANDLER.get_or_init(|| {
        // SAFETY: `sigaction` is plain data, for which zeroes are a valid value: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = arrived as extern "C" fn(libc::c_int) as usize;
        // SAFETY: the handler does nothing, so it may run at any time in any thread; both structures outlive the call.
        unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) == 0 }
    });
    if *is_there {
        // SAFETY: the signal's handler does nothing, and the kernel refuses a number that is none of our threads.
        unsafe {
            libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_thread_comes_back_from_a_call() {
        let (tell, told) = std::sync::mpsc::channel();
        let (tell_number, number) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell_number.send(own_number()).unwrap();
            let begun = Instant::now();
            // Not through the library, which goes on sleeping.
            let _ = rustix::thread::nanosleep(&rustix::fs::Timespec {
                tv_sec: 60,
                tv_nsec: 0,
            });
            let _ = tell.send(begun.elapsed());
        });
        let number = number.recv().unwrap();
        let slept = (0..500).find_map(|_| {
            interrupt(number);
            told.recv_timeout(Duration::from_millis(20)).ok()
        });
        assert!(slept.is_some_and(|slept| slept < Duration::from_secs(50)));
        thread.join().unwrap();
    }
}

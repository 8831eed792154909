//! Having a thread of our own come back from a system call that takes too long.

use std::sync::OnceLock;

/// What is sent. Nobody means anything else by it: without a handler it is ignored, and it comes from sockets only where that is asked for.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Does nothing: that there is a handler is what ends the call.
extern "C" fn arrived(_: libc::c_int) {}

/// The number of the calling thread, by which it is interrupted.
pub fn own_number() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Sends it to a thread of this process: a system call that looks for signals ends with `EINTR`. One that is not there (any more) is not.
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
        // SAFETY: it sends a signal for which there is a handler that does nothing, to a thread of this process and to no other process:
        // the kernel refuses a number that is none of its threads.
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

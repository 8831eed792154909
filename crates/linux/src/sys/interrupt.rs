//! Having a thread of our own come back from a system call that takes too long.

use std::os::unix::thread::JoinHandleExt;
use std::sync::OnceLock;
use std::thread::JoinHandle;

/// What is sent. Nobody means anything else by it: without a handler it is ignored, and it comes from sockets only where that is asked for.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Does nothing: that there is a handler is what ends the call.
extern "C" fn arrived(_: libc::c_int) {}

/// Sends it to a thread: a system call that looks for signals ends with `EINTR`.
pub fn interrupt(thread: &JoinHandle<()>) {
    static HANDLER: OnceLock<bool> = OnceLock::new();
    let is_there = HANDLER.get_or_init(|| {
        // SAFETY: `sigaction` is plain data, for which zeroes are a valid value: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = arrived as extern "C" fn(libc::c_int) as usize;
        // SAFETY: the handler does nothing, so it may run at any time in any thread; both structures outlive the call.
        unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) == 0 }
    });
    if *is_there {
        // SAFETY: a handle that was neither joined nor dropped names a thread that exists or can still be joined.
        unsafe {
            libc::pthread_kill(thread.as_pthread_t(), SIGNAL);
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
        let thread = std::thread::spawn(move || {
            let begun = Instant::now();
            // Not through the library, which goes on sleeping.
            let _ = rustix::thread::nanosleep(&rustix::fs::Timespec {
                tv_sec: 60,
                tv_nsec: 0,
            });
            let _ = tell.send(begun.elapsed());
        });
        let slept = (0..500).find_map(|_| {
            interrupt(&thread);
            told.recv_timeout(Duration::from_millis(20)).ok()
        });
        assert!(slept.is_some_and(|slept| slept < Duration::from_secs(50)));
        thread.join().unwrap();
    }
}

//! Being run in time while a program pays for it.
//!
//! What counting may cost is held by a thread that looks every few milliseconds. On a machine with more work than CPUs it would
//! have to wait for its turn meanwhile, and the program would pay for longer.

use rustix::process::{getpriority_process, setpriority_process};

/// Nice value of a thread that is looked at by nobody else while a program pays for it.
const URGENT: i32 = -15;

/// This thread goes before others until this ends. Where that is not permitted it goes like them.
pub(crate) struct Urgent {
    /// Nice value to go back to.
    before: Option<i32>,
    /// Only of the thread that began it.
    _here: std::marker::PhantomData<*const ()>,
}

impl Urgent {
    pub(crate) fn begin() -> Self {
        // For Linux no process means this thread.
        let before = getpriority_process(None)
            .ok()
            .filter(|now| *now > URGENT && setpriority_process(None, URGENT).is_ok());
        Self {
            before,
            _here: std::marker::PhantomData,
        }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // Going back behind others is always permitted.
            let _ = setpriority_process(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_urgent_for_as_long_as_it_says_so() {
        let nice = || getpriority_process(None).unwrap();
        let usual = nice();
        let urgent = Urgent::begin();
        if urgent.before.is_none() {
            println!("skipped: this user may not go before others");
        } else {
            assert_eq!(nice(), URGENT);
            let inner = Urgent::begin();
            drop(inner);
            assert_eq!(nice(), URGENT, "the inner one ended, the outer one did not");
        }
        drop(urgent);
        assert_eq!(nice(), usual);
    }
}

//! Raises the priority of a thread while a program pays for its counting. On an overloaded machine, a late check of the
//! cost would make the program pay for longer.

use rustix::process::{getpriority_process, setpriority_process};

/// Nice value of such a thread.
const URGENT: i32 = -15;

/// Raises this thread's priority until dropped, if permitted.
pub(crate) struct Urgent {
    before: Option<i32>,
    /// Not `Send`: the priority belongs to the thread that began it.
    _here: std::marker::PhantomData<*const ()>,
}

impl Urgent {
    pub(crate) fn begin() -> Self {
        // On Linux, `None` means this thread.
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
            // Lowering the priority is always permitted.
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

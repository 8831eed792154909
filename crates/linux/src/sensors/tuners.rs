//! Other programs that tune the machine. homeostat names them, so that a person knows who else may change
//! things; which of them conflicts with a strategy is for the strategy to say (irqbalance, for one, never touches
//! large pages).

/// Programs by their name in `/proc/PID/comm` (cut to 15 characters by the kernel) and the name shown.
///
/// Scripts run as their interpreter, so tuned and bpftune are also recognised by their script's name in
/// [`by_argument`].
const BY_PROGRAM: &[(&str, &str)] = &[
    ("bpftune", "bpftune"),
    ("irqbalance", "irqbalance"),
    ("ksmtuned", "ksmtuned"),
    ("numad", "numad"),
    ("oomd", "oomd"),
    ("power-profiles-", "power-profiles-daemon"),
    ("systemd-oomd", "systemd-oomd"),
    ("thermald", "thermald"),
    ("tlp", "tlp"),
    ("tuned", "tuned"),
    ("uresourced", "uresourced"),
];

/// The tuner that a program name stands for.
pub fn by_program(comm: &str) -> Option<&'static str> {
    BY_PROGRAM
        .iter()
        .find(|(name, _)| *name == comm)
        .map(|(_, shown)| *shown)
}

/// The tuner that a command line stands for: an interpreter whose script is a tuner.
pub fn by_argument(arguments: &[&[u8]]) -> Option<&'static str> {
    // The script is the first argument that is not an option: `python3 -Es /usr/sbin/tuned -l -P`.
    let script = arguments.iter().skip(1).find(|a| !a.starts_with(b"-"))?;
    let name = script.rsplit(|&b| b == b'/').next()?;
    by_program(std::str::from_utf8(name).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuned_is_recognised_as_a_script_too() {
        let line: [&[u8]; 4] = [b"/usr/bin/python3", b"-Es", b"/usr/sbin/tuned", b"-l"];
        assert_eq!(by_argument(&line), Some("tuned"));
        assert_eq!(by_program("numad"), Some("numad"));
        assert_eq!(by_program("number-cruncher"), None);
        assert_eq!(by_argument(&[b"vi", b"/etc/tuned/tuned-main.conf"]), None);
        assert_eq!(by_argument(&[]), None);
    }
}

//! `homeostat tunable set` and `unset` on the kernel that the tests run on: what pairs of settings do is the kernel's. What is
//! changed is put back. Strict overcommit alone looks at these, so nothing depends on them while it is off.

use homeostat_daemon::tunables::{Places, Which, Wish, set, unset};
use std::fs;

const RATIO: &str = "/proc/sys/vm/overcommit_ratio";
const BYTES: &str = "/proc/sys/vm/overcommit_kbytes";

fn read(file: &str) -> String {
    fs::read_to_string(file).unwrap_or_default().trim().to_owned()
}

/// Puts the ratio back whatever happens; that sets the other one to zero.
struct PutBack(String);

impl Drop for PutBack {
    fn drop(&mut self) {
        let _ = fs::write(RATIO, &self.0);
    }
}

#[test]
fn of_a_pair_what_was_found_first_comes_back_by_whichever_name() {
    let writable = |file| fs::OpenOptions::new().write(true).open(file).is_ok();
    let is_idle = fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() != "2");
    if !rustix::process::geteuid().is_root()
        || !is_idle
        || !writable(RATIO)
        || !writable(BYTES)
        || read(BYTES) != "0"
    {
        eprintln!("skipped: needs root, and {RATIO} writable and used by nobody");
        return;
    }
    let found = read(RATIO);
    let _back = PutBack(found.clone());
    let directory = tempfile::tempdir().unwrap();
    let places = Places {
        root: None,
        state_directory: directory.path().join("state"),
        run_directory: directory.path().join("run"),
    };
    let wish = |name: &str, value: &str, force| Wish {
        name: name.to_owned(),
        value: value.to_owned(),
        force,
        restricted: false,
        dry_run: false,
    };
    for name in ["vm.overcommit_ratio", "vm.overcommit_kbytes"] {
        // The person who was here before us may have chosen it: that is what comes back.
        set(&places, &wish("vm.overcommit_ratio", "61", true)).unwrap();
        set(&places, &wish("vm.overcommit_kbytes", "4096", false)).unwrap();
        assert_eq!((read(RATIO).as_str(), read(BYTES).as_str()), ("0", "4096"));
        // What we made zero is not taken for somebody else's choice.
        set(&places, &wish("vm.overcommit_ratio", "62", false)).unwrap();
        let one = Which::One(name.to_owned());
        let tried = unset(&places, &one, true).unwrap();
        let back = unset(&places, &one, false).unwrap();
        assert_eq!(
            (read(RATIO), read(BYTES)),
            (found.clone(), "0".to_owned()),
            "{name}"
        );
        for told in [tried, back] {
            let told: Vec<(&str, &str, &str, &str)> = told
                .changes
                .iter()
                .map(|c| (c.path.as_str(), c.from.as_str(), c.to.as_str(), c.remark.as_str()))
                .collect();
            assert_eq!(
                told,
                [(RATIO, "62", found.as_str(), ""), (BYTES, "0", "0", "")],
                "{name}"
            );
        }
    }
}

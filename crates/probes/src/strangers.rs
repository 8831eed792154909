//! Finds untrusted users, who could exploit the worst case of breakpoints.
//!
//! While a breakpoint comes or goes, nobody on the machine can fork. A user with a fork in progress can prolong that
//! (docs/security.md): by storage without answer, or by a few threads that take its CPU. So unless a person asks for
//! probe sites, they are used only while every user present may become root.
//!
//! The kernel records the login: `sshd`, `login` or `cron` set `loginuid` (audit), and all descendants inherit it, also
//! through `su` and `sudo`. It is unset for services and for containers of root's daemons. But small ssh servers, batch
//! systems and services with shells need not set it. So the user id of a process counts too, if it is in the range for
//! people or for containers with shifted ids. It counts in addition to a login, because what an administrator starts by
//! hand keeps the administrator's login, but may run for others.

use homeostat_kernel::Root;
use homeostat_kernel::bytes::{lines, number};
use homeostat_kernel::process::user_ids;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::DirEntryExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Shortest interval of scans of all processes.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Validity of a process's users. A younger process may still be on its way from `sshd` to a user.
const HOLDS: Duration = Duration::from_secs(60);
/// The refusal lasts this long after they have gone, so that logins do not start and break off trials.
const GONE_FOR: Duration = Duration::from_secs(300);
const PROCESSES_MAX: usize = 32 * 1024;
/// Most bytes read of passwd or group.
const FILE_MAX: u64 = 1 << 20;
/// `loginuid` without a login.
const UNSET: u32 = u32::MAX;
/// User ids of people: `UID_MIN` and `UID_MAX` in login.defs(5), followed by those of systemd-homed. The others below
/// 65,536 belong to services, systemd's dynamic users, and nobody.
const PEOPLE: std::ops::RangeInclusive<u32> = 1000..=60_513;
/// First user id of containers with shifted ids.
const SHIFTED_FROM: u32 = 65_536;
/// Groups whose members may become root.
const OF_ADMINISTRATORS: [&[u8]; 3] = [b"sudo", b"wheel", b"admin"];

struct Known {
    /// Inode of its directory: another inode means another process.
    inode: u64,
    first: Instant,
    read: Instant,
    users: Users,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum User {
    Is(u32),
    Untold,
}

/// The persons for whom a process runs: by login, and by user id.
type Users = [Option<User>; 2];

/// Watches for untrusted users.
#[derive(Default)]
pub(crate) struct Strangers {
    known: BTreeMap<i32, Known>,
    looked: Option<Instant>,
    /// Time and description of the last untrusted user.
    last: Option<(Instant, String)>,
}

impl Strangers {
    /// Why probe sites are not used without a request.
    pub(crate) fn why_not(&mut self, root: &Root, now: Instant) -> Option<String> {
        let is_due = self
            .looked
            .is_none_or(|at| now.saturating_duration_since(at) >= LOOK_EVERY);
        if is_due {
            self.looked = Some(now);
            match self.look(root, now) {
                Ok(None) => {}
                Ok(Some(who)) => self.last = Some((now, who)),
                Err(e) => self.last = Some((now, format!("somebody whom homeostat cannot see ({e})"))),
            }
        }
        let (at, who) = self.last.as_ref()?;
        let ago = now.saturating_duration_since(*at);
        if ago >= GONE_FOR {
            return None;
        }
        let is = if ago < LOOK_EVERY * 2 {
            "is"
        } else {
            "was until a moment ago"
        };
        Some(format!(
            "progress points are not used while {who} {is} here, who may not become root: nobody can fork while a breakpoint comes or \
             goes, and that can be drawn out; where everybody is trusted: meters.progress_points = true"
        ))
    }

    /// The untrusted user present now, if any.
    fn look(&mut self, root: &Root, now: Instant) -> io::Result<Option<String>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(root.path("/proc"))? {
            let entry = entry?;
            let pid = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<i32>().ok());
            entries.extend(pid.map(|pid| (pid, entry)));
            if entries.len() > PROCESSES_MAX {
                // Before any is read.
                return Err(io::Error::other("more processes than are looked at"));
            }
        }
        let mut seen = BTreeMap::new();
        for (pid, entry) in entries {
            let inode = entry.ino();
            let before = self.known.remove(&pid).filter(|known| known.inode == inode);
            let known = match before {
                Some(known) if now.saturating_duration_since(known.read) < HOLDS && !is_young(&known) => {
                    known
                }
                before => Known {
                    inode,
                    first: before.map_or(now, |known| known.first),
                    read: now,
                    users: users_of(&entry.path()),
                },
            };
            seen.insert(pid, known);
        }
        self.known = seen;
        let users = self.known.values().flat_map(|known| known.users);
        let users: BTreeSet<User> = users.flatten().collect();
        if users.is_empty() {
            return Ok(None);
        }
        let passwd = read_bounded(&root.path("/etc/passwd")).unwrap_or_default();
        let group = read_bounded(&root.path("/etc/group")).unwrap_or_default();
        let administrators = administrators(&passwd, &group);
        Ok(stranger(&users, &administrators).map(|user| match user {
            User::Is(user) => format!("{} (user {user})", name_of(&passwd, user)),
            User::Untold => "somebody whose process cannot be looked at".to_owned(),
        }))
    }
}

/// Its user may change yet.
fn is_young(known: &Known) -> bool {
    known.read.saturating_duration_since(known.first) < HOLDS
}

/// The first untrusted user.
fn stranger(users: &BTreeSet<User>, administrators: &BTreeSet<u32>) -> Option<User> {
    users.iter().copied().find(|user| match user {
        User::Is(user) => !administrators.contains(user),
        User::Untold => true,
    })
}

fn users_of(process: &Path) -> Users {
    [login_of(process), owner_of(process)]
}

/// The login from which a process was started. `None`: root, none, or the process ended.
fn login_of(process: &Path) -> Option<User> {
    match fs::read(process.join("loginuid")) {
        Ok(text) => match number(text.trim_ascii()).and_then(|user| u32::try_from(user).ok()) {
            Some(UNSET | 0) => None,
            Some(user) => Some(User::Is(user)),
            None => Some(User::Untold),
        },
        // A kernel without audit, or an ended process.
        Err(e) if is_gone(&e) => None,
        Err(_) => Some(User::Untold),
    }
}

/// The user id of a process. The owner of its directory would be root for a process that is not dumpable.
fn owner_of(process: &Path) -> Option<User> {
    match fs::read(process.join("status")) {
        Ok(text) => user_ids(&String::from_utf8_lossy(&text))
            .into_iter()
            .find(|user| is_person(*user))
            .map(User::Is),
        Err(e) if is_gone(&e) => None,
        Err(_) => Some(User::Untold),
    }
}

fn is_gone(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH)
}

fn is_person(user: u32) -> bool {
    PEOPLE.contains(&user) || user >= SHIFTED_FROM
}

/// The users who may become root, by passwd(5) and group(5).
fn administrators(passwd: &[u8], group: &[u8]) -> BTreeSet<u32> {
    let (mut groups, mut names) = (BTreeSet::new(), BTreeSet::new());
    for line in lines(group) {
        let mut fields = line.split(|byte| *byte == b':');
        let (name, number, members) = (fields.next(), fields.nth(1), fields.next());
        if name.is_some_and(|name| OF_ADMINISTRATORS.contains(&name)) {
            groups.extend(number.map(<[u8]>::to_vec));
            let members = members.unwrap_or_default().split(|byte| *byte == b',');
            names.extend(members.filter(|name| !name.is_empty()).map(<[u8]>::to_vec));
        }
    }
    users(passwd)
        .filter(|(name, _, group)| names.contains(*name) || groups.contains(*group))
        .map(|(_, user, _)| user)
        .collect()
}

fn users(passwd: &[u8]) -> impl Iterator<Item = (&[u8], u32, &[u8])> {
    lines(passwd).filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let (name, user, group) = (fields.next()?, fields.nth(1)?, fields.next()?);
        Some((name, u32::try_from(number(user)?).ok()?, group))
    })
}

fn name_of(passwd: &[u8], user: u32) -> String {
    let found = users(passwd).find(|(_, number, _)| *number == user);
    let name = found.map(|(name, ..)| String::from_utf8_lossy(name).into_owned());
    name.filter(|name| !name.chars().any(char::is_control))
        .unwrap_or_else(|| "somebody".to_owned())
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    fs::File::open(path)?.take(FILE_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > FILE_MAX {
        // A truncated file proves nothing about anybody.
        return Err(io::Error::other("larger than a file of users is"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\npostgres:x:105:110::/:/bin/sh\nanna:x:1000:1000::/:/bin/sh\n\
                          bob:x:1001:27::/:/bin/sh\ncarl:x:1002:1002::/:/bin/sh\nodd:x:y\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:anna,\ncdrom:x:24:carl\nodd\n";

    struct Machine {
        _keep: tempfile::TempDir,
        root: Root,
    }

    impl Machine {
        fn new() -> Self {
            let keep = tempfile::tempdir().unwrap();
            let root = Root::new(keep.path());
            let machine = Self { _keep: keep, root };
            machine.put("/etc/passwd", PASSWD);
            machine.put("/etc/group", GROUP);
            machine.runs(1, "4294967295");
            machine
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn runs(&self, pid: i32, login: &str) {
            self.put(&format!("/proc/{pid}/loginuid"), login);
        }

        fn ends(&self, pid: i32) {
            fs::remove_dir_all(self.root.path(&format!("/proc/{pid}"))).unwrap();
        }

        fn why_not(&self, strangers: &mut Strangers, now: Instant) -> Option<String> {
            strangers.why_not(&self.root, now)
        }
    }

    #[test]
    fn who_logged_in_and_may_not_become_root_is_a_stranger_whatever_may_be_mounted() {
        let machine = Machine::new();
        let why = |login: &str| {
            machine.runs(7, login);
            machine.why_not(&mut Strangers::default(), Instant::now())
        };
        assert_eq!(why("4294967295"), None, "a service");
        assert_eq!(why("0"), None, "root");
        assert_eq!(why("1000"), None, "a member of sudo");
        assert_eq!(why("1001"), None, "whose own group is sudo");
        assert!(why("1002").unwrap().contains("carl (user 1002) is here"));
        assert!(
            why("4000").unwrap().contains("somebody (user 4000)"),
            "of a directory service"
        );
        assert!(why("what").unwrap().contains("cannot be looked at"));
    }

    #[test]
    fn a_login_that_is_trusted_hides_nobody_for_whom_a_process_runs() {
        let machine = Machine::new();
        let why = |login: &str, user: u32| {
            machine.runs(7, login);
            let ids = format!("Name:\tx\nUid:\t{user}\t{user}\t{user}\t{user}\n");
            machine.put("/proc/7/status", &ids);
            machine.why_not(&mut Strangers::default(), Instant::now())
        };
        // root, or an administrator, has started a server from a shell, which lets others in.
        for login in ["0", "1000"] {
            assert_eq!(why(login, 0), None);
            assert_eq!(why(login, 105), None, "a service");
            assert_eq!(why(login, 1000), None);
            assert!(why(login, 1002).unwrap().contains("carl (user 1002)"), "{login}");
            assert!(why(login, 100_033).is_some(), "a container of {login}");
        }
        assert!(
            why("1002", 1000).unwrap().contains("carl (user 1002)"),
            "the other way round"
        );
    }

    #[test]
    fn where_nobody_noted_a_login_the_user_of_a_process_counts() {
        for has_login in [true, false] {
            let machine = Machine::new();
            if !has_login {
                fs::remove_file(machine.root.path("/proc/1/loginuid")).unwrap();
            }
            let why = |user: u32| {
                let ids = format!("Name:\tx\nUid:\t0\t{user}\t0\t{user}\nGid:\t0\t0\t0\t0\n");
                machine.put("/proc/1/status", &ids);
                machine
                    .why_not(&mut Strangers::default(), Instant::now())
                    .is_some()
            };
            for (user, is_stranger) in [
                (0, false),
                (105, false),
                // Of a service that systemd gave a number, and nobody.
                (61_184, false),
                (65_534, false),
                (1000, false),
                (1002, true),
                (59_999, true),
                // Of systemd-homed, and of nobody.
                (60_513, true),
                (60_514, false),
                // In a container with numbers of its own.
                (1_000_033, true),
            ] {
                assert_eq!(why(user), is_stranger, "{user}");
            }
        }
    }

    #[test]
    fn it_counts_for_five_minutes_after_they_have_gone() {
        let machine = Machine::new();
        let (mut strangers, begun) = (Strangers::default(), Instant::now());
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        assert_eq!(machine.why_not(&mut strangers, at(0)), None);
        machine.runs(8, "1002");
        assert_eq!(
            machine.why_not(&mut strangers, at(4)),
            None,
            "it is looked every five seconds"
        );
        assert!(machine.why_not(&mut strangers, at(5)).is_some());
        machine.ends(8);
        let told = machine.why_not(&mut strangers, at(100)).unwrap();
        assert!(told.contains("was until a moment ago"), "{told}");
        assert!(machine.why_not(&mut strangers, at(300)).is_some());
        assert_eq!(machine.why_not(&mut strangers, at(310)), None);
    }

    #[test]
    fn a_process_that_becomes_somebodys_after_it_was_seen_is_looked_at_again() {
        let machine = Machine::new();
        let (mut strangers, begun) = (Strangers::default(), Instant::now());
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        machine.runs(9, "4294967295");
        assert_eq!(machine.why_not(&mut strangers, at(0)), None);
        // sshd has let somebody in.
        machine.runs(9, "1002");
        assert!(machine.why_not(&mut strangers, at(10)).is_some());
        // Later it is asked once a minute.
        let mut strangers = Strangers::default();
        machine.runs(9, "4294967295");
        for seconds in (0..200).step_by(5) {
            assert_eq!(machine.why_not(&mut strangers, at(seconds)), None);
        }
        machine.runs(9, "1002");
        assert!(
            (200..270)
                .step_by(5)
                .any(|seconds| machine.why_not(&mut strangers, at(seconds)).is_some())
        );
    }

    #[test]
    fn where_the_files_of_users_are_missing_nobody_is_an_administrator() {
        let machine = Machine::new();
        fs::remove_file(machine.root.path("/etc/group")).unwrap();
        machine.runs(7, "1000");
        assert!(
            machine
                .why_not(&mut Strangers::default(), Instant::now())
                .is_some()
        );
        // Nor where there are no processes to be seen at all.
        fs::remove_dir_all(machine.root.path("/proc")).unwrap();
        let told = machine
            .why_not(&mut Strangers::default(), Instant::now())
            .unwrap();
        assert!(told.contains("cannot see"), "{told}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(a in proptest::collection::vec(any::<u8>(), 0..300), b in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = administrators(&a, &b);
            let _ = name_of(&a, 7);
        }
    }
}

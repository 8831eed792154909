//! Whom a breakpoint concerns: whether one may be put into a file now, or taken out.
//!
//! The kernel puts a breakpoint only into the address spaces that it was asked for. But to find them it goes through all that map
//! the file and locks each of them for a moment, and no process of the machine can fork meanwhile; and the same when it takes the
//! breakpoint out. One whose address space is held by a request that is never answered (a hung network file system) would hold
//! up everybody. So, before a breakpoint is put anywhere ([`Files::allow`]):
//! * no process outside of the workload maps the file ([`census`]),
//! * no process of the workload maps storage that a program or another machine answers for ([`homeostat_sensors::storage`]),
//! * no thread of the workload stands still in the kernel, nobody traces one, nobody has frozen them ([`threads`]),
//! * nobody on the machine stands still while it makes a process ([`forks`]),
//! * its code does not lie in large pages, which a breakpoint would split ([`large`]),
//! * the memory that it is permitted has room for the pages that become its own ([`room`]).
//!
//! Before a breakpoint is taken out ([`Files::settled`]) nobody that maps the file stands still, and nobody who makes a process; while somebody does, it stays
//! where it is, and is looked after until it can go ([`keeper`]).
//!
//! Processes that a security module keeps even from whoever may look at any are not a user's own: of them it is only looked whether
//! they wait for a disk without end.
//!
//! Both are looks: what begins between one of them and the kernel's call is not seen.

pub(crate) mod census;
mod forks;
pub(crate) mod keeper;
pub(crate) mod large;
mod room;
mod stack;
pub(crate) mod threads;

use census::{Census, Family};
use forks::Before;
use homeostat_kernel::Root;
use homeostat_meters::code_file::CodeFile;
use homeostat_model::ProcessId;
use homeostat_sensors::storage;
pub(crate) use homeostat_sensors::storage::{DeviceInode, Refusal};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Before breakpoints are taken out it is not looked again so soon after a look: they are hit meanwhile.
const LOOKED_JUST_NOW: Duration = Duration::from_millis(250);

/// Reads a list of mappings.
pub(crate) fn parse_mappings(bytes: &[u8]) {
    census::parse(bytes);
}

/// Who else may map the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    /// Nobody.
    None,
    /// Whoever does is looked at like the workload: a person named this file in the configuration.
    LookedAt,
}

/// A file in which something is counted.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Of a mapping of it.
    pub(crate) device_inode: DeviceInode,
    /// As the process sees it.
    pub(crate) path: String,
    /// Held open.
    pub(crate) file: Arc<CodeFile>,
}

/// The files in which something is counted, and how.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// Which.
    pub(crate) targets: Vec<Target>,
    /// Who else may map them.
    pub(crate) others: Others,
    /// Pages that become a process's own, at most.
    pub(crate) pages: u64,
    /// When it was last seen that nobody stands still.
    pub(crate) looked: Looked,
}

/// When it was last seen of some files, by whoever looked, that nobody stands still whom they concern.
#[derive(Clone, Debug, Default)]
pub(crate) struct Looked(Arc<Mutex<Option<Instant>>>);

impl Looked {
    fn is_just_now(&self) -> bool {
        let looked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        looked.is_some_and(|then| then.elapsed() < LOOKED_JUST_NOW)
    }

    fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

impl Files {
    /// Whether breakpoints may be put into them now, for these processes, in whom there are some already.
    ///
    /// # Errors
    /// A sentence: somebody is concerned who must not be, or that cannot be told.
    pub(crate) fn allow(&self, root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
        self.allow_by(Census::recent(root)?.as_ref(), root, processes, Before::Attaching)
    }

    /// The same before the first of them: everybody is looked at anew.
    ///
    /// # Errors
    /// As of [`Self::allow`].
    pub(crate) fn allow_first(&self, root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
        self.allow_by(Census::fresh(root)?.as_ref(), root, processes, Before::First)
    }

    fn allow_by(
        &self,
        census: &Census,
        root: &Root,
        processes: &[ProcessId],
        before: Before,
    ) -> Result<(), Refusal> {
        let family = census.family(processes);
        if let Some(pid) = census.checkpointer() {
            return Err(Refusal::Now(format!(
                "process {pid} (criu) keeps or brings back the state of programs, and would keep breakpoints with it"
            )));
        }
        for target in &self.targets {
            if self.others == Others::None {
                census.allow(&family, &target.device_inode, &target.path)?;
            }
            target.file.still_plain(&target.path)?;
        }
        let concerned = self.concerned(census, &family, processes);
        for process in &concerned {
            storage::allow_mapped(root, *process, census.mapped_by(*process)?.into_iter())?;
        }
        room::allow(root, processes, self.pages)?;
        for process in processes {
            threads::at_liberty(root, *process)?;
        }
        let (own, others): (Vec<ProcessId>, Vec<ProcessId>) = concerned
            .into_iter()
            .partition(|p| processes.contains(p) || family.has(p.pid));
        threads::quiet(root, &own)?;
        threads::settled(root, &others)?;
        threads::settled_by_state(root, &census.closed())?;
        forks::settled(root, before)?;
        self.looked.note();
        Ok(())
    }

    /// Whether breakpoints can be taken out of them now without waiting for somebody who stands still. What was seen just now holds;
    /// and who maps the files is not looked at anew: each look is time in which they are hit.
    ///
    /// # Errors
    /// A sentence: who does.
    pub(crate) fn settled(&self, root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
        self.settled_before(root, processes, Before::Removing)
    }

    /// The same before they are put in once more, by who has looked at everybody not long ago.
    ///
    /// # Errors
    /// A sentence: who does, or may.
    pub(crate) fn settled_still(&self, root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
        self.settled_before(root, processes, Before::Attaching)
    }

    fn settled_before(&self, root: &Root, processes: &[ProcessId], before: Before) -> Result<(), Refusal> {
        if self.looked.is_just_now() {
            return Ok(());
        }
        let census = match Census::last() {
            Some(census) => census,
            None => Census::recent(root)?,
        };
        let family = census.family(processes);
        threads::settled(root, &self.concerned(&census, &family, processes))?;
        threads::settled_by_state(root, &census.closed())?;
        forks::settled(root, before)?;
        self.looked.note();
        Ok(())
    }

    /// Processes whose address spaces the kernel locks: the workload, its children, and whoever else maps one of the files.
    fn concerned(&self, census: &Census, family: &Family, processes: &[ProcessId]) -> Vec<ProcessId> {
        let mut concerned: Vec<ProcessId> = processes.to_vec();
        concerned.extend(census.ids(family.pids()));
        for target in &self.targets {
            concerned.extend(census.ids(census.users(&target.device_inode, &target.path).into_iter()));
        }
        concerned.sort_unstable();
        concerned.dedup();
        concerned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_meters::code_file::{code_mappings, own_code};
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    struct Sleeper(Child);

    impl Sleeper {
        /// Returns when it runs the program.
        fn start(program: &std::path::Path) -> Self {
            let this = Self(Command::new(program).arg("600").spawn().unwrap());
            let begun = Instant::now();
            let maps = || std::fs::read_to_string(format!("/proc/{}/maps", this.0.id())).unwrap_or_default();
            while !code_mappings(&maps())
                .iter()
                .any(|m| std::path::Path::new(&m.path) == program)
            {
                assert!(begun.elapsed() < Duration::from_secs(60), "it was not executed");
                std::thread::sleep(Duration::from_millis(10));
            }
            this
        }

        fn process(&self) -> ProcessId {
            let stat = std::fs::read(format!("/proc/{}/stat", self.0.id())).unwrap();
            ProcessId {
                pid: i32::try_from(self.0.id()).unwrap(),
                start_ticks: homeostat_kernel::process::start_ticks(&stat).unwrap(),
            }
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn what_was_seen_just_now_is_not_looked_at_again() {
        let empty = tempfile::tempdir().unwrap();
        let root = Root::new(empty.path());
        let files = Files {
            targets: Vec::new(),
            others: Others::None,
            pages: 1,
            looked: Looked::default(),
        };
        // Nobody can be looked at here, so that every look is refused.
        assert!(files.settled(&root, &[]).is_err());
        assert!(!files.looked.is_just_now(), "what was refused was not seen");
        files.clone().looked.note();
        assert_eq!(files.settled(&root, &[]), Ok(()));
    }

    #[test]
    fn a_file_that_others_map_or_that_comes_to_give_privileges_is_refused() {
        let root = Root::default();
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("sleep");
        if !["/bin/sleep", "/usr/bin/sleep"]
            .iter()
            .any(|p| std::fs::copy(p, &program).is_ok())
        {
            println!("skipped: no sleep to copy");
            return;
        }
        let first = Sleeper::start(&program);
        let process = first.process();
        let mapping = match own_code(&root, process).and_then(|mapping| {
            CodeFile::executable(&root, process)?;
            Ok(mapping)
        }) {
            Ok(mapping) => mapping,
            Err(why) => {
                println!("skipped: {why}");
                return;
            }
        };
        let files = |others| Files {
            targets: vec![Target {
                device_inode: mapping.device_inode,
                path: mapping.path.clone(),
                file: Arc::new(CodeFile::executable(&root, process).unwrap()),
            }],
            others,
            pages: 1,
            looked: Looked::default(),
        };
        let alone = files(Others::None);
        match alone.allow_first(&root, &[process]) {
            Ok(()) => {}
            // What runs on this machine beside the test is not known.
            Err(why) => {
                assert!(!why.to_string().contains("is mapped by"), "{why}");
                println!("skipped: {why}");
                return;
            }
        }
        let second = Sleeper::start(&program);
        match alone.allow_first(&root, &[process]) {
            Err(Refusal::Lasting(why)) => {
                assert!(
                    why.contains(&format!("process {}", second.process().pid)),
                    "{why}"
                );
            }
            // Others come and go meanwhile, and may be looked at too late.
            Err(Refusal::Now(why)) => assert!(why.contains("cannot be told"), "{why}"),
            Ok(()) => panic!("another process maps it"),
        }
        // Both are of the workload; or a person named the file, and the second is looked at.
        let both = alone.allow_first(&root, &[process, second.process()]);
        let named = files(Others::LookedAt).allow_first(&root, &[process]);
        for allowed in [both, named] {
            assert!(!matches!(allowed, Err(Refusal::Lasting(_))), "{allowed:?}");
        }
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
        // Others may be looked at too late for a while.
        let begun = Instant::now();
        let why = loop {
            match alone.allow_first(&root, &[process, second.process()]) {
                Err(Refusal::Lasting(why)) => break why,
                other => assert!(begun.elapsed() < Duration::from_secs(120), "{other:?}"),
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        assert!(why.contains("gives privileges"), "{why}");
    }
}

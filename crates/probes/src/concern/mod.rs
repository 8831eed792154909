//! Safety checks: whether inserting or removing a breakpoint in a file now could block a process.
//!
//! The kernel writes only into the requested address spaces. But it locks every address space that maps the file for a
//! moment, and blocks all forks of the machine meanwhile. One that a hung request holds (network file system) would
//! block everybody. So before an insertion ([`Files::allow`]):
//! * No process outside the workload maps the file ([`census`]).
//! * No process of the workload maps storage served by a program or another machine ([`homeostat_sensors::storage`]).
//! * No thread of the workload stands still in the kernel, is traced or frozen ([`threads`]).
//! * No thread of the machine is stuck in a fork ([`forks`]).
//! * The code is not in large pages ([`large`]), and the memory limit has room for the private pages ([`room`]).
//!
//! Before a removal ([`Files::settled`]), nobody who maps the file or forks may stand still, or [`keeper`] retries
//! later. Processes that a security module closes even to us are not a user's, and are only checked for endless disk
//! waits. A change between a check and the kernel call stays unseen.

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

/// A check this recent suffices for a removal, because each check prolongs the hits.
const LOOKED_JUST_NOW: Duration = Duration::from_millis(250);

pub(crate) fn parse_mappings(bytes: &[u8]) {
    census::parse(bytes);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    None,
    /// Anybody, with the same checks as the workload: a person named this file in the configuration.
    LookedAt,
}

#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Of a mapping of it.
    pub(crate) device_inode: DeviceInode,
    /// As the process sees it.
    pub(crate) path: String,
    pub(crate) file: Arc<CodeFile>,
}

/// The files with counted places, and the rules for them.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) targets: Vec<Target>,
    pub(crate) others: Others,
    /// Most pages that become private to a process.
    pub(crate) pages: u64,
    pub(crate) looked: Looked,
}

/// Time of the last check of some files, by any caller, that found nobody standing still.
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
    /// Checks that breakpoints may be inserted now for these processes, which already have some.
    ///
    /// # Errors
    /// A sentence: a check failed, or has no answer.
    pub(crate) fn allow(&self, root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
        self.allow_by(Census::recent(root)?.as_ref(), root, processes, Before::Attaching)
    }

    /// The same before the first insertion, with new scans.
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

    /// Checks that removing breakpoints blocks nobody now. A recent check is reused, and mappings are not rescanned,
    /// because the breakpoints are hit meanwhile.
    ///
    /// # Errors
    /// A sentence: who stands still.
    pub(crate) fn settled(&self, root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
        self.settled_before(root, processes, Before::Removing)
    }

    /// The same before another insertion, shortly after a full check.
    ///
    /// # Errors
    /// A sentence: who stands still, or may.
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

    /// Processes whose address spaces the kernel locks: the workload, its children, and others that map a file.
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

use crate::concern::census::*;

fn census() -> Census {
    Census::empty(Instant::now())
}

fn process(parent: i32, executable: u64) -> Process {
    Process {
        start_ticks: 1,
        parent,
        executable: Some((1, executable)),
    }
}

fn id(pid: i32) -> ProcessId {
    ProcessId { pid, start_ticks: 1 }
}

const CODE: &str = "1000-2000 r-xp 00000000 fe:00 70 /srv/x\n";

#[test]
fn lines_of_mappings_name_their_file() {
    let line = "7f00-7f10 rw-p 00001000 fd:0a 1234                       /a b (deleted)";
    assert_eq!(file_of(line), Some((((0xfd, 0x0a), 1234), "/a b (deleted)")));
    assert_eq!(
        file_of("7f00-7f10 rw-p 00000000 00:00 0                  [heap]"),
        None
    );
    assert_eq!(file_of("7f00-7f10 rw-p 00000000 00:00 0 "), None);
    for bad in [
        "",
        "7f00",
        "7f00-7f10 rw-p 0 fd 1 /x",
        "7f00-7f10 rw-p 0 zz:0 1 /x",
    ] {
        assert_eq!(file_of(bad), None, "{bad}");
    }
}

#[test]
fn the_basics_are_found_behind_any_name() {
    let tail = " S 7 2 3 4 5 2097152 7 8 9 10 11 12 13 14 15 16 17 18 4242 20 21";
    for name in ["a", "a b", "a) S 1 2 (b", "((("] {
        let parsed = Basics::parse(format!("12 ({name}){tail}").as_bytes()).unwrap();
        assert_eq!(parsed.name, name.as_bytes());
        assert_eq!(
            (parsed.parent, parsed.flags, parsed.start_ticks),
            (7, KERNEL_THREAD, 4242)
        );
    }
    for bad in ["", "1 (a", "1 (a) S 1", "1 (a) S x 2 3 4 5 6"] {
        assert_eq!(Basics::parse(bad.as_bytes()), None, "{bad}");
    }
}

#[test]
fn a_file_of_layers_is_known_by_its_number_or_its_path_from_either_side() {
    let (disk, layers, other_disk) = ((0xfe, 0), (0, 50), (8, 1));
    let same = |a: (DeviceInode, &str), b: (DeviceInode, &str)| {
        let one = may_be_same(&a.0, a.1, &b.0, b.1);
        assert_eq!(one, may_be_same(&b.0, b.1, &a.0, a.1), "from either side");
        one
    };
    assert!(same(((disk, 7), "/a"), ((disk, 7), "/b")));
    assert!(
        !same(((disk, 7), "/a"), ((disk, 8), "/a")),
        "a file that was replaced"
    );
    assert!(!same(((disk, 7), "/a"), ((other_disk, 7), "/a")), "two disks");
    assert!(same(
        ((disk, 7), "/var/layers/1/diff/usr/x"),
        ((layers, 7), "/usr/y")
    ));
    // The upper half says which layer.
    assert!(same(((disk, 7), "/a"), ((layers, 7 | 1 << 40), "/b")));
    assert!(same(
        ((disk, 7), "/var/layers/1/diff/usr/x"),
        ((layers, 9), "/usr/x (deleted)")
    ));
    assert!(!same(((disk, 7), "/var/ax"), ((layers, 9), "/b/ax")));
    assert!(!same(((layers, 7), "/usr/x"), ((layers, 9), "/usr/x")));
}

#[test]
fn strangers_are_told_from_the_family() {
    let mut census = census();
    census.add(10, process(1, 5), b"x", Ok(CODE.to_owned()));
    // Forked a moment ago; another program that the workload has started; a child of the child.
    census.add(11, process(10, 5), b"x", Ok(CODE.to_owned()));
    census.add(12, process(10, 6), b"y", Ok(CODE.to_owned()));
    census.add(13, process(11, 5), b"x", Ok(CODE.to_owned()));
    let family = census.family(&[id(10)]);
    assert_eq!(family.pids().collect::<Vec<_>>(), [10, 11, 13]);
    let file = ((0xfe, 0), 70);
    let why = census.allow(&family, &file, "/srv/x").unwrap_err();
    assert!(
        matches!(why, Refusal::Lasting(_)) && why.to_string().contains("process 12"),
        "{why}"
    );
    assert_eq!(census.allow(&family, &((0xfe, 0), 71), "/srv/z"), Ok(()));
    assert_eq!(
        census.users(&file, "/srv/x").into_iter().collect::<Vec<_>>(),
        [10, 11, 12, 13]
    );
    assert_eq!(census.running((1, 6)), [id(12)]);
    // A number that another process has by now is nobody of the family.
    let later = ProcessId {
        pid: 10,
        start_ticks: 2,
    };
    assert_eq!(census.family(&[later]).pids().count(), 0);
    assert_eq!(census.mapped_by(id(10)).unwrap(), [(file, "/srv/x")]);
}

#[test]
fn what_is_not_known_is_no_permission() {
    let file = ((0xfe, 0), 71);
    let mut lacking = census();
    lacking.add(10, process(1, 5), b"x", Ok(CODE.to_owned()));
    lacking.add(20, process(1, 9), b"z", Err("EACCES".to_owned()));
    let family = lacking.family(&[id(10)]);
    let why = lacking.allow(&family, &file, "/srv/z").unwrap_err().to_string();
    assert!(why.contains("process 20: EACCES"), "{why}");
    assert!(lacking.mapped_by(id(20)).is_err() && lacking.mapped_by(id(10)).is_ok());
    let mut many = census();
    many.incomplete = Some("there are more than 3 processes".to_owned());
    let why = many
        .allow(&Family(BTreeSet::new()), &file, "/srv/z")
        .unwrap_err()
        .to_string();
    assert!(why.contains("more than 3"), "{why}");
    let mut frozen = census();
    assert_eq!(frozen.checkpointer(), None);
    frozen.add(33, process(1, 9), b"criu", Ok(String::new()));
    assert_eq!(frozen.checkpointer(), Some(33));
}

#[test]
fn the_running_processes_are_looked_at_and_a_thread_that_outlives_the_first_is_asked() {
    let root = Root::default();
    let census = Census::look(&root).unwrap();
    let own = i32::try_from(std::process::id()).unwrap();
    let me = census.ids(std::iter::once(own));
    // Who is kept from us is known by number and start.
    assert!(
        census
            .closed()
            .iter()
            .all(|p| !census.processes.contains_key(&p.pid))
    );
    if census.lacking.contains_key(&own) {
        println!("skipped: this machine is too busy to read our own mappings in time");
        return;
    }
    assert_eq!(me.len(), 1);
    assert!(!census.mapped_by(me[0]).unwrap().is_empty());
    let stat = std::fs::metadata("/proc/self/exe").unwrap();
    use std::os::unix::fs::MetadataExt;
    assert!(census.running((stat.dev(), stat.ino())).contains(&me[0]));
    // The kernel's own threads are nobody.
    assert!(!census.processes.contains_key(&2) || census.lacking.is_empty());
    let dir = rustix::fs::open("/proc/self", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    assert!(maps_of(&dir).unwrap().unwrap().contains("r-xp"));
    // A directory without any of it: as of a process that has ended.
    let empty = tempfile::tempdir().unwrap();
    let none = rustix::fs::open(empty.path(), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    assert_eq!(maps_of(&none), Ok(None));
    // The first thread has ended: its list is empty, that of another thread is not.
    std::fs::write(empty.path().join("maps"), "").unwrap();
    std::fs::create_dir_all(empty.path().join("task/7")).unwrap();
    std::fs::create_dir_all(empty.path().join("task/9")).unwrap();
    std::fs::write(empty.path().join("task/7/maps"), "").unwrap();
    assert_eq!(maps_of(&none), Ok(None), "all have ended");
    std::fs::write(empty.path().join("task/9/maps"), CODE).unwrap();
    assert_eq!(maps_of(&none), Ok(Some(CODE.to_owned())));
    // What is there and cannot be read is not gone.
    std::fs::remove_file(empty.path().join("maps")).unwrap();
    std::fs::create_dir(empty.path().join("maps")).unwrap();
    assert_eq!(maps_of(&none), Err(Errno::ISDIR));
    assert!(matches!(Sight::unless_gone(Errno::ACCESS), Sight::Unknown(_)));
    assert!(matches!(Sight::unless_gone(Errno::MFILE), Sight::Unknown(_)));
    assert!(matches!(Sight::unless_gone(Errno::SRCH), Sight::Nobody));
}

#[test]
fn who_may_look_at_any_process_is_told_by_its_capabilities() {
    let tree = tempfile::tempdir().unwrap();
    let root = Root::new(tree.path());
    assert!(!may_look_at_any(&root));
    std::fs::create_dir_all(tree.path().join("proc/self")).unwrap();
    for (held, may) in [
        ("000001ffffffffff", true),
        ("000001fffff7ffff", false),
        ("nonsense", false),
    ] {
        let text = format!("Name:\ta\nCapPrm:\t000001ffffffffff\nCapEff:\t{held}\n");
        std::fs::write(tree.path().join("proc/self/status"), text).unwrap();
        assert_eq!(may_look_at_any(&root), may, "{held}");
    }
    // All capabilities, of a name space of its own.
    let text = "CapEff:\t000001ffffffffff\n";
    std::fs::write(tree.path().join("proc/self/status"), text).unwrap();
    std::fs::create_dir_all(tree.path().join("proc/self/ns")).unwrap();
    let link = tree.path().join("proc/self/ns/user");
    for (users, may) in [("user:[4026532000]", false), (USERS_OF_THE_MACHINE, true)] {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(users, &link).unwrap();
        assert_eq!(may_look_at_any(&root), may, "{users}");
    }
}

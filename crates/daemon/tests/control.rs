//! The control socket and the loop, end to end over a real socket, with a stand-in for the runtime.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_daemon::board::Board;
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::control::{
    self, CONNECTIONS_MAX, CONNECTIONS_OF_ROOT, ControlError, REQUEST_BYTES_MAX, Server,
};
use homeostat_daemon::log::Log;
use homeostat_daemon::machine_lock::{MachineLock, Sole};
use homeostat_daemon::notify::Manager;
use homeostat_daemon::service::{self, Driven, Ended, Message, Service};
use homeostat_daemon::settings::{LogFormat, Settings, Sources};
use homeostat_daemon::switch::Standing;
use homeostat_engine::view::{Budget, Change, Experiment, Stage, Status, Workload};
use homeostat_engine::{Mode, OperatorRequest, Story};
use homeostat_model::{
    ActionId, Bytes, Capability, CapabilityId, CapabilityState, ExperimentId, ExperimentKind, Machine,
    Nanoseconds, WorkloadKind,
};
use homeostat_platform::Clock;
use homeostat_runtime::Turn;
use homeostat_sensors::settings::watch::ForeignWrite;
use serde_json::json;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

struct RealClock(Instant);
impl Clock for RealClock {
    fn now(&self) -> Nanoseconds {
        Nanoseconds(u64::try_from(self.0.elapsed().as_nanos()).unwrap())
    }
    fn unix_seconds(&self) -> u64 {
        1_700_000_000
    }
    fn sleep(&self, time: Nanoseconds) {
        std::thread::sleep(Duration::from_nanos(time.0));
    }
}

fn workload(id: &str, program: &str, pid: i64) -> Workload {
    Workload {
        name: id.into(),
        kind: WorkloadKind::Unit,
        program: program.into(),
        fingerprint: format!("unit {id}"),
        owner: "machine".into(),
        pids: vec![pid],
        processes: 1,
        age_s: 100.0,
        cpus: 0.9,
        resident_bytes: 1 << 30,
        huge_bytes: None,
        stage: Stage::Observed,
        undone: false,
        summary: "watching".into(),
        meter: None,
        meters: [].into(),
        proposal: None,
        decisions: [].into(),
    }
}

/// A trial whose first conversion has cost something before any block was measured.
fn in_trial(id: &str) -> Experiment {
    Experiment {
        id: ExperimentId(8),
        kind: ExperimentKind::Switchback,
        strategy: "large_pages".into(),
        workload: id.into(),
        others: vec![],
        phase: "preparing".into(),
        prepared: 0.9,
        blocks: 0,
        latest: vec![],
        on: true,
        washout_s: 2.0,
        measured_s: 4.0,
        effect: None,
        evidence: 1.0,
        evidence_needed: 1000.0,
        elapsed_s: 30.0,
        budget_s: 3600.0,
        stalled_s: 13.8,
        bloat_bytes: 4096,
        lost_work_s: 14.84,
        own_cpu_s: 1.25,
    }
}

/// Keeps what it was asked, and undoes at once.
struct Fake {
    view: Status,
    asked: Arc<Mutex<Vec<OperatorRequest>>>,
    stories: Vec<Story>,
    finished: bool,
    never_finishes: bool,
    /// What another probe of the machine shows.
    again: Option<Machine>,
}

impl Driven for Fake {
    fn turn(&mut self) -> Turn {
        Turn {
            stories: std::mem::take(&mut self.stories),
            wake_at: Nanoseconds(u64::MAX),
            finished: self.finished && !self.never_finishes,
        }
    }
    fn operator(&mut self, request: OperatorRequest) {
        match &request {
            OperatorRequest::Undo(id) => self.view.in_force.retain(|c| c.action != *id),
            OperatorRequest::UndoAll => self.view.in_force.clear(),
            OperatorRequest::Pause => self.view.paused = true,
            OperatorRequest::Resume => self.view.paused = false,
            OperatorRequest::Stop { .. } => self.finished = true,
            OperatorRequest::Configure(policy) if policy.mode == Mode::AdviseOnly => {
                self.view.in_force.clear()
            }
            OperatorRequest::Configure(_) | OperatorRequest::Machine(_) | OperatorRequest::Yield(..) => {}
        }
        let text = format!(
            "asked: {}",
            format!("{request:?}").split([' ', '(']).next().unwrap()
        );
        self.stories.push(Story {
            workload: None,
            stage: Stage::Observed,
            text,
            warning: false,
        });
        self.asked.lock().unwrap().push(request);
    }
    fn view(&self) -> Status {
        self.view.clone()
    }
    fn probe_again(&mut self) -> Option<Machine> {
        self.again.take()
    }
    fn setting_is_others(&mut self, path: &str, why: &str) -> Vec<ActionId> {
        let ours = if path == BALANCING {
            vec![ActionId(5)]
        } else {
            vec![]
        };
        for id in &ours {
            self.operator(OperatorRequest::Yield(*id, why.to_owned()));
        }
        ours
    }
    fn wrote_setting(&self, path: &str, value: &str) -> bool {
        path == BALANCING && value == "1"
    }
}

/// The setting that change 5 is about.
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";

struct Daemon {
    directory: tempfile::TempDir,
    socket: PathBuf,
    asked: Arc<Mutex<Vec<OperatorRequest>>>,
    sender: SyncSender<Message>,
    server: Server,
    running: JoinHandle<Ended>,
}

impl Daemon {
    fn start(never_finishes: bool) -> Self {
        Self::start_with(never_finishes, None)
    }

    fn start_with(never_finishes: bool, again: Option<Machine>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("run/io.homeostat");
        let config = directory.path().join("homeostat.toml");
        std::fs::write(&config, "[policy]\n").unwrap();
        let board = Arc::new(Board::default());
        let (lock, state) = (
            directory.path().join("daemon.lock"),
            directory.path().join("state"),
        );
        let (sender, inbox) = service::channel();
        let listener = control::bind(&socket, "root").unwrap();
        let server = Server::start(listener, &socket, board.clone(), service::post(sender.clone())).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let mut settings = Settings::default();
        settings.policy.seed = 1;
        let running = {
            let asked = asked.clone();
            let change = |action| Change {
                action: ActionId(action),
                strategy: "large_pages".into(),
                workload: "redis-server.service".into(),
                text: "512 pieces".into(),
                effect: Some(
                    homeostat_model::Effect {
                        estimate: 0.1,
                        lower: 0.05,
                        upper: f64::INFINITY,
                        confidence: 0.9,
                    }
                    .into(),
                ),
                since_unix: 5,
                guard: "probation 1 of 30".into(),
                on: true,
            };
            let view = Status {
                workloads: vec![
                    workload("redis-server.service", "redis-server", 4711),
                    workload("latency[7]", "latency", 7),
                    workload("latency[8]", "latency", 8),
                ],
                in_force: vec![change(5), change(6)],
                experiments: vec![in_trial("latency[7]")],
                budget: Budget {
                    harm_exposure_day: 1484.0,
                    ..Budget::default()
                },
                machine_refusals: vec!["large_pages: memory was short".into()],
                ..Status::default()
            };
            let board = board.clone();
            std::thread::spawn(move || {
                let mut driven = Fake {
                    view,
                    asked,
                    stories: vec![],
                    finished: false,
                    never_finishes,
                    again,
                };
                Service {
                    driven: &mut driven,
                    clock: &RealClock(Instant::now()),
                    board,
                    inbox,
                    manager: Manager::none(),
                    log: Log::new(LogFormat::Json, false),
                    settings,
                    sources: Sources {
                        file: Some(config),
                        set: vec![],
                    },
                    notes: vec!["memory is not locked".into()],
                    first_look: None,
                    book: None,
                    standing: Standing::read(&state, Mode::Act, None),
                    sole: Sole::new(&lock, &state),
                }
                .run()
            })
        };
        // The first publication precedes everything else.
        let deadline = Instant::now() + Duration::from_secs(20);
        while board.view().workloads.is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        Self {
            directory,
            socket,
            asked,
            sender,
            server,
            running,
        }
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket).unwrap()
    }

    fn stop(mut self) -> Ended {
        self.sender.send(Message::Stop).unwrap();
        let ended = self.running.join().unwrap();
        self.server.stop();
        assert!(!self.socket.exists(), "the socket is gone after the end");
        ended
    }
}

#[test]
fn the_price_of_a_running_trial_is_in_the_status_and_in_the_metrics() {
    let daemon = Daemon::start(false);
    let status = daemon.client().status().unwrap();
    let e = &status.experiments[0];
    assert_eq!((e.blocks, e.stalled_s, e.bloat_bytes), (0, 13.8, 4096));
    assert_eq!((e.lost_work_s, e.own_cpu_s), (14.84, 1.25));
    assert_eq!(status.budget.harm_exposure_day, 1484.0);
    let text = homeostat_daemon::metrics::render(&status);
    for (name, value) in [
        ("trial_stalled_seconds", "13.8"),
        ("trial_lost_work_seconds", "14.84"),
        ("trial_added_memory_bytes", "4096"),
        ("trial_own_cpu_seconds", "1.25"),
    ] {
        let line = text
            .lines()
            .find(|l| l.starts_with(&format!("homeostat_{name}{{")));
        assert!(
            line.is_some_and(|l| l.ends_with(&format!(" {value}"))),
            "{name}: {line:?}"
        );
    }
    assert!(
        text.contains("\nhomeostat_harm_exposure_day_seconds 14.84\n"),
        "{text}"
    );
    daemon.stop();
}

#[test]
fn state_is_read_and_requests_reach_the_loop() {
    let daemon = Daemon::start(false);
    let mut client = daemon.client();
    let status = client.status().unwrap();
    assert_eq!((status.schema, status.pid), (1, i64::from(std::process::id())));
    assert_eq!(status.notes, ["memory is not locked"]);
    assert_eq!(
        status.in_force[0].effect.as_ref().unwrap().upper,
        None,
        "infinity is absent"
    );

    for name in ["redis-server.service", "redis-server", "4711", "redis"] {
        assert_eq!(
            client.explain(name).unwrap().workload.name.as_str(),
            "redis-server.service",
            "{name}"
        );
    }
    let near = client.explain("latency[9]").unwrap_err();
    assert!(matches!(&near, ClientError::WorkloadNotFound { near, ambiguous: false, .. } if near.len() == 2));
    let several = client.explain("latency").unwrap_err();
    assert!(
        matches!(&several, ClientError::WorkloadNotFound { near, ambiguous: true, .. } if near.len() == 2)
    );

    client.pause().unwrap();
    assert!(
        client.status().unwrap().paused,
        "a request is visible as soon as it is answered"
    );
    client.resume().unwrap();
    assert!(!client.status().unwrap().paused);

    let missing = client.undo(99).unwrap_err();
    assert!(matches!(&missing, ClientError::ActionNotFound { action: 99, in_force } if *in_force == [5, 6]));
    client.undo(5).unwrap();
    assert_eq!(client.undo_all().unwrap(), [6]);
    assert!(client.status().unwrap().in_force.is_empty());
    let asked = daemon.asked.lock().unwrap().clone();
    assert_eq!(
        asked,
        [
            OperatorRequest::Pause,
            OperatorRequest::Resume,
            OperatorRequest::Undo(ActionId(5)),
            OperatorRequest::UndoAll
        ]
    );
    drop(client);
    assert_eq!(daemon.stop(), Ended::Settled);
}

#[test]
fn a_reload_takes_the_new_policy_and_refuses_a_broken_file() {
    let daemon = Daemon::start(false);
    let config = daemon.directory.path().join("homeostat.toml");
    let mut client = daemon.client();
    assert_eq!(client.reload().unwrap(), Vec::<String>::new());
    std::fs::write(
        &config,
        "[policy]\nage_min_s = 7\n[paths]\nstate_directory = \"/elsewhere\"\n",
    )
    .unwrap();
    let notes = client.reload().unwrap();
    assert_eq!(notes, ["[paths] takes effect after a restart"]);
    std::fs::write(&config, "[policy]\nage_min = 7\n").unwrap();
    let error = client.reload().unwrap_err();
    assert!(
        matches!(&error, ClientError::BadConfiguration(text) if text.contains("homeostat.toml:2:1")),
        "{error}"
    );
    let asked = daemon.asked.lock().unwrap().clone();
    let [OperatorRequest::Configure(policy)] = asked.as_slice() else {
        panic!("{asked:?}")
    };
    assert_eq!(
        (policy.age_min_s, policy.seed),
        (7.0, 1),
        "the drawn seed is kept"
    );
    drop(client);
    daemon.stop();
}

#[test]
fn a_daemon_that_only_advised_may_not_begin_to_act_beside_another() {
    let daemon = Daemon::start(false);
    let config = daemon.directory.path().join("homeostat.toml");
    let lock = daemon.directory.path().join("daemon.lock");
    let other = MachineLock::take(&lock, Path::new("/the/other")).unwrap();
    let mut client = daemon.client();
    std::fs::write(&config, "[policy]\nage_min_s = 7\n").unwrap();
    let error = client.reload().unwrap_err();
    assert!(
        matches!(&error, ClientError::BadConfiguration(text) if text.contains("/the/other")),
        "{error}"
    );
    assert!(
        daemon.asked.lock().unwrap().is_empty(),
        "nothing reached the mind"
    );
    drop(other);
    assert_eq!(client.reload().unwrap(), Vec::<String>::new());
    drop(client);
    daemon.stop();
}

#[test]
fn the_switch_is_recorded_first_undoes_everything_and_holds_until_it_is_set_again() {
    let daemon = Daemon::start(false);
    let switch = daemon.directory.path().join("state/switch");
    let mut client = daemon.client();
    let before = client.status().unwrap().switch.unwrap();
    assert!(before.on && before.by == "default", "{before:?}");
    let off = client.switch(false).unwrap();
    assert_eq!((off.changed, off.actions, off.problem), (true, vec![5, 6], None));
    assert!(
        !off.switch.on && off.switch.change == "homeostat on",
        "{:?}",
        off.switch
    );
    assert_eq!(std::fs::read_to_string(&switch).unwrap(), "off\n");
    let status = client.status().unwrap();
    assert!(status.in_force.is_empty() && !status.switch.unwrap().on);
    let modes = |daemon: &Daemon| -> Vec<Mode> {
        let asked = daemon.asked.lock().unwrap();
        let mode = |r: &OperatorRequest| match r {
            OperatorRequest::Configure(policy) => Some(policy.mode),
            _ => None,
        };
        asked.iter().filter_map(mode).collect()
    };
    // The engine hears of a policy, so that a recording tells of it; nobody is told to remember a refusal.
    assert_eq!(modes(&daemon), [Mode::AdviseOnly]);
    assert!(!daemon.asked.lock().unwrap().contains(&OperatorRequest::UndoAll));
    // A reload does not let it act.
    assert_eq!(client.reload().unwrap(), Vec::<String>::new());
    let again = client.switch(false).unwrap();
    assert!(!again.changed && again.actions.is_empty(), "{again:?}");
    assert_eq!(modes(&daemon), [Mode::AdviseOnly]);
    // The configuration forbids it; the line is named.
    let config = daemon.directory.path().join("homeostat.toml");
    std::fs::write(&config, "[policy]\nmode = \"advise-only\"\n").unwrap();
    client.reload().unwrap();
    let forbidden = client.switch(true).unwrap();
    assert!(forbidden.changed && !forbidden.switch.on);
    let problem = forbidden.problem.unwrap();
    assert!(problem.contains("homeostat.toml, line 2"), "{problem}");
    assert_eq!(std::fs::read_to_string(&switch).unwrap(), "on\n");
    assert_eq!(modes(&daemon), [Mode::AdviseOnly]);
    std::fs::write(&config, "[policy]\n").unwrap();
    client.reload().unwrap();
    assert_eq!(modes(&daemon), [Mode::AdviseOnly, Mode::Act]);
    let on = client.status().unwrap().switch.unwrap();
    assert!(on.on && on.change == "homeostat off", "{on:?}");
    daemon.stop();
}

#[test]
fn an_acting_daemon_beside_this_one_keeps_the_switch_off() {
    let daemon = Daemon::start(false);
    let mut client = daemon.client();
    client.switch(false).unwrap();
    let other = MachineLock::take(&daemon.directory.path().join("daemon.lock"), Path::new("/other")).unwrap();
    let refused = client.switch(true).unwrap();
    assert!(!refused.changed && !refused.switch.on, "{refused:?}");
    assert!(refused.problem.unwrap().contains("/other"));
    let switch = daemon.directory.path().join("state/switch");
    assert_eq!(std::fs::read_to_string(&switch).unwrap(), "off\n");
    drop(other);
    assert!(client.switch(true).unwrap().switch.on);
    daemon.stop();
}

#[test]
fn a_switch_that_cannot_be_recorded_is_off_for_this_run_and_never_on() {
    let daemon = Daemon::start(false);
    let mut client = daemon.client();
    std::fs::write(daemon.directory.path().join("state"), "no directory").unwrap();
    let off = client.switch(false).unwrap();
    assert!(off.changed && !off.switch.on && off.problem.is_some(), "{off:?}");
    assert!(client.status().unwrap().in_force.is_empty());
    let on = client.switch(true).unwrap();
    assert!(!on.changed && !on.switch.on && on.problem.is_some(), "{on:?}");
    daemon.stop();
}

#[test]
fn what_failed_for_a_passing_reason_is_probed_again_at_a_reload() {
    let works = |id: &str| Capability {
        id: CapabilityId::new(id),
        state: CapabilityState::Available,
        detail: String::new(),
        cost_of_absence: String::new(),
        remedy: String::new(),
    };
    let machine = Machine {
        kernel: "6.12".into(),
        cpu_model: "unknown".into(),
        hypervisor: None,
        cpus: vec![],
        nodes: vec![],
        memory: Bytes::from_mib(1024),
        page_size: Bytes(4096),
        huge_page_size: Bytes::from_mib(2),
        llc_size: Bytes::ZERO,
        boot_id: String::new(),
        capabilities: vec![works("process_madvise.collapse"), works("process_madvise.split")],
    };
    let daemon = Daemon::start_with(false, Some(machine.clone()));
    let mut client = daemon.client();
    client.reload().unwrap();
    client.reload().unwrap();
    let asked = daemon.asked.lock().unwrap().clone();
    assert_eq!(asked, [OperatorRequest::Machine(Box::new(machine))], "once");
    let mut told = Vec::new();
    client
        .follow(0, |part| {
            told.extend(part.lines.into_iter().map(|l| l.text));
            false
        })
        .unwrap();
    assert!(
        told.contains(&"the machine was probed again: large_pages works now".to_owned()),
        "{told:?}"
    );
    daemon.stop();
}

#[test]
fn the_interface_introspects_itself() {
    let daemon = Daemon::start(false);
    let address = format!("unix:{}", daemon.socket.display());
    let connection = varlink::Connection::with_address(&address).unwrap();
    let mut service = varlink::OrgVarlinkServiceClient::new(connection);
    use varlink::OrgVarlinkServiceInterface;
    let info = service.get_info().unwrap();
    assert!(
        info.interfaces.iter().any(|i| i == "io.homeostat"),
        "{:?}",
        info.interfaces
    );
    let text = service
        .get_interface_description("io.homeostat")
        .unwrap()
        .description
        .unwrap();
    assert!(text.contains("method UndoAll() -> (actions: []int)"));
    drop(service);
    daemon.stop();
}

#[test]
fn the_story_is_followed_until_the_daemon_ends() {
    let daemon = Daemon::start(false);
    let follower = daemon.client();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let following = {
        let lines = lines.clone();
        std::thread::spawn(move || {
            follower.follow(0, |part| {
                lines
                    .lock()
                    .unwrap()
                    .extend(part.lines.into_iter().map(|l| l.text));
                true
            })
        })
    };
    // It must be there before the daemon goes.
    while lines.lock().unwrap().is_empty() && !following.is_finished() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    daemon.client().pause().unwrap();
    daemon.stop();
    following.join().unwrap().unwrap();
    let lines = lines.lock().unwrap().clone();
    assert_eq!(
        lines,
        [
            "memory is not locked",
            "asked: Pause",
            "stopping: undoing every change",
            "asked: Stop"
        ]
    );
}

fn raw(socket: &Path, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The server may hang up before it has read everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn garbage_and_oversize_are_answered_or_dropped_and_harm_nobody() {
    let daemon = Daemon::start(false);
    for bytes in [
        &b"not json\0"[..],
        b"\0",
        b"[]\0",
        b"{\"method\": 5}\0",
        b"{\"method\": \"GetStatus\"",
        b"\xff\xfe\0",
    ] {
        let answer = raw(&daemon.socket, bytes);
        assert!(!answer.contains("status"), "{answer}");
    }
    let mut long = vec![b'x'; REQUEST_BYTES_MAX + 10];
    long.push(0);
    let answer = raw(&daemon.socket, &long);
    assert!(
        answer.is_empty() || answer.contains("longer than 64 KiB"),
        "{answer}"
    );
    for (request, error) in [
        (
            json!({"method": "io.homeostat.Nonsense"}),
            "org.varlink.service.MethodNotFound",
        ),
        (
            json!({"method": "io.elsewhere.X"}),
            "org.varlink.service.InterfaceNotFound",
        ),
        (
            json!({"method": "io.homeostat.Explain"}),
            "org.varlink.service.InvalidParameter",
        ),
        (
            json!({"method": "io.homeostat.Undo", "parameters": {"action": "five"}}),
            "org.varlink.service.InvalidParameter",
        ),
    ] {
        let answer = raw(&daemon.socket, format!("{request}\0").as_bytes());
        assert!(answer.contains(error), "{request} -> {answer}");
    }
    // Two requests in one packet get two answers.
    let one = format!("{}\0", json!({"method": "io.homeostat.GetPlan"}));
    assert_eq!(
        raw(&daemon.socket, format!("{one}{one}").as_bytes())
            .matches("\"plan\"")
            .count(),
        2
    );
    assert!(daemon.client().status().is_ok());
    daemon.stop();
}

#[test]
fn connections_are_bounded_and_root_always_gets_one() {
    let daemon = Daemon::start(false);
    if !rustix::process::geteuid().is_root() {
        println!("skipped: the socket is root's");
        return;
    }
    // As many as there are, all idle; root comes in all the same, many times over.
    let mut held: Vec<Client> = (0..CONNECTIONS_MAX).map(|_| daemon.client()).collect();
    for client in &mut held {
        client.status().unwrap();
    }
    for _ in 0..3 * CONNECTIONS_MAX {
        held.push(daemon.client());
        held.last_mut().unwrap().status().unwrap();
    }
    let served = held.iter_mut().filter_map(|client| client.status().ok()).count();
    assert!(
        (1..=CONNECTIONS_MAX).contains(&served),
        "{served} connections are served at the same time"
    );
    // Connections that are busy are not thrown out: followers, each known to be served by its first answer.
    let followers: Vec<UnixStream> = (0..CONNECTIONS_MAX)
        .map(|_| {
            let mut stream = UnixStream::connect(&daemon.socket).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let follow = json!({"method": "io.homeostat.Follow", "more": true, "parameters": {"since": 0}});
            stream.write_all(format!("{follow}\0").as_bytes()).unwrap();
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            stream
        })
        .collect();
    let error = daemon.client().status().unwrap_err();
    assert!(
        matches!(&error, ClientError::Busy(_) | ClientError::Broken { .. }),
        "{error:?}"
    );
    drop(followers);
    drop(held);
    daemon.client().pause().unwrap_or_default();
    let deadline = Instant::now() + Duration::from_secs(20);
    while daemon.client().status().is_err() {
        assert!(Instant::now() < deadline, "connections are freed");
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.stop();
}

#[test]
fn others_can_not_keep_root_out() {
    use std::os::unix::process::CommandExt as _;
    let daemon = Daemon::start(false);
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be somebody else");
        return;
    }
    // Somebody who may read holds as many connections as he gets, each with a request that never ends.
    std::fs::set_permissions(
        daemon.directory.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    std::fs::set_permissions(
        daemon.socket.parent().unwrap(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    std::fs::set_permissions(
        &daemon.socket,
        std::os::unix::fs::PermissionsExt::from_mode(0o666),
    )
    .unwrap();
    let mut hog = std::process::Command::new("perl")
        .args([
            "-MIO::Socket::UNIX",
            "-e",
            r#"$| = 1; $SIG{PIPE} = "IGNORE"; for (1..12) { my $s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or next;
               print $s "{\"method\":\"io.homeostat.Follow\",\"more\":true,\"parameters\":{\"since\":0}}\0";
               $s->flush; sysread($s, my $b, 1); sysread($s, $b, 60);
               $served++ if $b =~ /continues|lines/; push @all, $s } print "served $served\n"; <STDIN>"#,
        ])
        .arg(&daemon.socket)
        .uid(65_534)
        .gid(65_534)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(hog.stdout.as_mut().unwrap()),
        &mut line,
    )
    .unwrap();
    let outcome = daemon.client().undo(5);
    let _ = hog.kill();
    let _ = hog.wait();
    assert_eq!(
        line,
        format!("served {}\n", CONNECTIONS_MAX - CONNECTIONS_OF_ROOT)
    );
    outcome.unwrap();
    daemon.stop();
}

#[test]
fn a_second_daemon_is_refused_and_a_stale_socket_is_replaced() {
    let daemon = Daemon::start(false);
    assert!(matches!(
        control::bind(&daemon.socket, "root"),
        Err(ControlError::AlreadyRunning(_))
    ));
    daemon.stop();
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(control::bind(&socket, "root").is_ok());
    assert!(matches!(
        control::bind(&socket, "no-such-group"),
        Err(ControlError::NoSuchGroup(_))
    ));
    let missing = Client::connect(&directory.path().join("none"));
    assert!(matches!(missing, Err(ClientError::NotRunning(_))));
}

#[test]
fn asking_twice_to_stop_ends_at_once_and_says_what_is_left() {
    let daemon = Daemon::start(true);
    daemon.sender.send(Message::Stop).unwrap();
    assert_eq!(daemon.stop(), Ended::Unsettled { in_force: 2 });
}

#[test]
fn a_setting_that_somebody_else_wrote_is_told_once_and_ours_goes() {
    let daemon = Daemon::start(false);
    let write = |path: &str, to: &str, by: Option<&str>| ForeignWrite {
        name: path.rsplit('/').next().unwrap().into(),
        path: path.into(),
        from: "0".into(),
        to: to.into(),
        by: by.map(Into::into),
        own_command: false,
    };
    let writes = vec![
        // Found by a look, and what homeostat itself wrote: no news.
        write(BALANCING, "1", None),
        write("/proc/sys/vm/swappiness", "10", Some("sysctl (pid 7, user 0)")),
        write(BALANCING, "2", Some("sysctl (pid 7, user 0)")),
    ];
    daemon.sender.send(Message::Settings(writes.clone())).unwrap();
    daemon.sender.send(Message::Settings(writes)).unwrap();
    let mut client = daemon.client();
    // Answered after both messages.
    client.pause().unwrap();
    let lines: Vec<String> = client
        .story(0)
        .unwrap()
        .lines
        .into_iter()
        .map(|l| l.text)
        .filter(|t| t.contains("was changed"))
        .collect();
    assert_eq!(
        lines[0],
        "swappiness was changed from 0 to 10 by sysctl (pid 7, user 0): homeostat leaves it so"
    );
    assert_eq!(
        lines[1],
        "numa_balancing was changed from 0 to 2 by sysctl (pid 7, user 0): homeostat leaves it so, and withdraws its \
         change 5"
    );
    let yields = |asked: &[OperatorRequest]| {
        asked
            .iter()
            .filter(|r| matches!(r, OperatorRequest::Yield(ActionId(5), _)))
            .count()
    };
    assert_eq!(yields(&daemon.asked.lock().unwrap()), 2);
    assert_eq!(daemon.stop(), Ended::Settled);
}

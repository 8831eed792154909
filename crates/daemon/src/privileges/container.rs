//! The container: image file, start command, and system call filter.

use super::calls::NAMES;
use super::{Need, Privileges, RUN};
use serde_json::json;
use std::collections::BTreeSet;

/// Host directories shared with the container: state that outlives it, and files for others.
const SHARED: [&str; 3] = ["/var/lib/homeostat", "/run/homeostat", "/etc/homeostat"];

pub(super) fn file(privileges: &Privileges) -> String {
    let given = privileges.given();
    let writes_settings = given
        .iter()
        .any(|need| matches!(need, Need::Write(path) if path.starts_with("/proc/sys")));
    // By need: `restore` takes only the first part. The engine loads the filter last, so its calls need not pass it.
    let mut privileged = vec![
        "--pid=host --cgroupns=host --read-only --security-opt no-new-privileges".to_owned(),
        "--security-opt seccomp=packaging/seccomp.json --security-opt label=disable --security-opt apparmor=unconfined"
            .to_owned(),
    ];
    if writes_settings {
        privileged.push("--security-opt unmask=/proc/sys".into());
    }
    let mut capabilities = vec!["--cap-drop=ALL".to_owned()];
    for need in &given {
        if let Need::Capability(name) = need {
            capabilities.push(format!("--cap-add={}", name.trim_start_matches("CAP_")));
        }
    }
    privileged.extend(capabilities.chunks(5).map(|some| some.join(" ")));
    privileged.push("-v /sys:/sys -v /var/lib/homeostat:/var/lib/homeostat".into());
    let indent = |lines: &[String]| {
        lines
            .iter()
            .map(|line| format!("#       {line} \\\n"))
            .collect::<String>()
    };
    let mut run = privileged.clone();
    run.push(
        "--network=host --restart=on-failure --stop-timeout=150 --ulimit memlock=-1:-1 --pids-limit=64"
            .into(),
    );
    run.push(
        SHARED[1..]
            .iter()
            .map(|path| format!("-v {path}:{path}"))
            .collect::<Vec<_>>()
            .join(" "),
    );
    let device: String = given
        .iter()
        .filter_map(|need| match need {
            Need::Device { path, access, .. } => Some(format!(
                "#\n# {path} is there where its module is loaded. For the hardware prefetchers add:\n#       -v \
                 /dev/cpu:/dev/cpu --device-cgroup-rule='c {}:* {access}'\n",
                // The majors of linux/include/uapi/linux/major.h.
                if path.ends_with("cpuid") { 203 } else { 202 }
            )),
            _ => None,
        })
        .collect();
    format!(
        "# An image of homeostat: its static program alone, so that building it needs no network. Made by\n\
         # `homeostat privileges --container`. From the top of the source:\n\
         #\n\
         #   make dist                                                       # or any static build of the program\n\
         #   mkdir -p build/image && cp PROGRAM build/image/homeostat\n\
         #   podman build -f packaging/Containerfile -t homeostat build/image\n\
         #   mkdir -p {shared} && chmod 700 /var/lib/homeostat\n\
         #   podman run -d --name homeostat \\\n\
         {run}\
         #       homeostat\n\
         #   podman exec homeostat homeostat status\n\
         #\n\
         # It looks after the host, so it needs what the table of `homeostat privileges` says: all processes (--pid=host), the\n\
         # host's control groups and settings (/sys, --cgroupns=host, /proc/sys), the servers' own ports (--network=host).\n\
         # /var/lib/homeostat must outlive the container: the journal in it is what restores the machine after a kill. Stopping\n\
         # it undoes everything, for which it has the stop timeout; after a kill,\n\
         #   podman run --rm --network=none \\\n\
         {restore}\
         #       homeostat restore\n\
         # does. A change by hand (`homeostat tunable set`) writes other settings, too: run that command on the host, or in a\n\
         # container with --privileged instead of the options from --security-opt to --cap-add. The same is the way out where an\n\
         # engine does not know one of these options.\n\
         {device}\
         FROM scratch\n\
         COPY homeostat /usr/bin/homeostat\n\
         ENV PATH=/usr/bin\n\
         STOPSIGNAL SIGTERM\n\
         ENTRYPOINT [\"/usr/bin/homeostat\"]\n\
         CMD [{command}]\n",
        command = RUN.map(|word| format!("\"{word}\"")).join(", "),
        shared = SHARED.join(" "),
        run = indent(&run),
        restore = indent(&privileged),
    )
}

/// Every flag of clone(2) for a new namespace (linux/include/uapi/linux/sched.h): none is needed.
const NEW_NAMESPACES: u32 = 0x7e02_0000;
/// The namespace permitted for setns(2) (CLONE_NEWNET).
const NETWORK_NAMESPACE: u32 = 0x4000_0000;
/// `ENOSYS`: the C library falls back to clone(2), whose flags a filter sees.
const NO_SUCH_CALL: u32 = 38;

/// The seccomp filter: unnamed calls fail. Forbids what the unit's `RestrictNamespaces=net` does.
pub(super) fn seccomp(privileges: &Privileges) -> String {
    let mut names: BTreeSet<&str> = NAMES.split_ascii_whitespace().collect();
    names.extend(privileges.given().iter().filter_map(|need| match need {
        Need::Call(name) => Some(*name),
        _ => None,
    }));
    // A rule on an argument replaces the name.
    names.retain(|name| !["clone", "clone3", "setns"].contains(name));
    let rules = [
        json!({ "names": names, "action": "SCMP_ACT_ALLOW" }),
        json!({
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{ "index": 0, "value": NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ" }],
        }),
        json!({ "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": NO_SUCH_CALL }),
        json!({
            "names": ["setns"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{ "index": 1, "value": NETWORK_NAMESPACE, "op": "SCMP_CMP_EQ" }],
        }),
    ];
    let filter = json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": rules,
    });
    // A value of this shape can always be written.
    serde_json::to_string_pretty(&filter).unwrap_or_default() + "\n"
}

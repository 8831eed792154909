//! What the kernel does not show of `PR_THP_DISABLE_EXCEPT_ADVISED` is reported, with the kernel and a remedy.

use std::process::Command;

#[test]
fn doctor_lists_the_choices_that_this_kernel_does_not_show() {
    let output = Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let diagnosis: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let of = |id: &str| {
        let list = diagnosis["capabilities"].as_array().unwrap();
        list.iter()
            .find(|c| c["id"] == id)
            .unwrap_or_else(|| panic!("{id} is listed"))
            .clone()
    };
    let (release, enabled) = (
        std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap(),
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default(),
    );
    let mut numbers = release.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
    let is_new = (numbers.next(), numbers.next()) >= (Some(6), Some(18));
    let except = of("choices.thp_except_advised");
    if is_new && !enabled.contains("[always]") {
        assert_eq!(except["state"], "missing");
        assert!(
            except["detail"].as_str().unwrap().contains(release.trim()),
            "{except}"
        );
        assert!(
            except["remedy"].as_str().unwrap().contains("MemoryTHP="),
            "{except}"
        );
    } else {
        assert_eq!(except["state"], "available");
    }
    for id in ["choices.thp_disable", "choices.control_group"] {
        assert!(of(id)["detail"].as_str().is_some_and(|d| !d.is_empty()));
    }
}

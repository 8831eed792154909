//! How a person would make each kind of change without homeostat, and take it back.

/// The way by hand.
pub(super) struct ByHand {
    /// What it is called.
    pub(super) title: &'static str,
    /// Before the commands.
    pub(super) note: &'static str,
    /// Commands that make the change.
    pub(super) make: &'static [&'static str],
    /// Commands that take it back.
    pub(super) undo: &'static [&'static str],
}

/// The way by hand of a strategy; `None` for one that this program does not know (a newer daemon's).
pub(super) fn of(strategy: &str) -> Option<ByHand> {
    let way = match strategy {
        "large_pages" => ByHand {
            title: "large pages",
            note: "A program gets large pages for what it allocates from then on; whichever line fits the program, then start it \
                   again. Memory that it has already is converted by homeostat only.",
            make: &[
                "cat /sys/kernel/mm/transparent_hugepage/enabled    # remember it",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
                "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PROGRAM      # glibc 2.35 or newer",
                "java -XX:+UseTransparentHugePages …                # a Java virtual machine",
            ],
            undo: &[
                "echo VALUE_REMEMBERED > /sys/kernel/mm/transparent_hugepage/enabled",
                "# and start the program without the variable or option",
            ],
        },
        "cache_affinity" | "consolidation" | "relocation" => ByHand {
            title: "threads on one cache",
            note: "CPUS are those that share a last-level cache: `homeostat topology` shows them. homeostat leaves a program \
                   that a person bound alone.",
            make: &[
                "taskset -cp PID                                    # remember it",
                "taskset -acp CPUS PID                              # now, all threads",
                "systemctl set-property UNIT AllowedCPUs=CPUS       # for good",
            ],
            undo: &[
                "taskset -acp CPUS_REMEMBERED PID",
                "systemctl set-property UNIT AllowedCPUs=",
            ],
        },
        "memory_affinity" => ByHand {
            title: "memory beside its threads",
            note: "`homeostat locality` shows on which nodes threads and memory are. homeostat leaves a program that a person \
                   bound alone.",
            make: &[
                "migratepages PID FROM_NODES TO_NODES               # now",
                "numactl --cpunodebind=NODE --preferred=NODE PROGRAM  # from its next start",
            ],
            undo: &["migratepages PID TO_NODES FROM_NODES"],
        },
        "numa_balancing" => ByHand {
            title: "the kernel's NUMA balancing",
            note: "A setting of the whole host: it concerns every program that nobody bound.",
            make: &[
                "sysctl kernel.numa_balancing                       # remember it",
                "sysctl -w kernel.numa_balancing=1                  # 0 switches it off",
            ],
            undo: &["sysctl -w kernel.numa_balancing=VALUE_REMEMBERED"],
        },
        "file_cache" => ByHand {
            title: "a big reader kept to little memory",
            note: "UNIT is the reader, not the program that suffers from it. homeostat leaves a limit that a person set alone.",
            make: &[
                "systemctl show UNIT -p MemoryHigh                  # remember it",
                "systemctl set-property --runtime UNIT MemoryHigh=64M   # until the next boot",
                "systemd-run --scope -p MemoryHigh=64M COMMAND      # from the start",
            ],
            undo: &["systemctl set-property --runtime UNIT MemoryHigh=VALUE_REMEMBERED"],
        },
        "autotune" => ByHand {
            title: "programs kept in memory rather than files",
            note: "Settings of the whole host. Without swap, or where programs work on mapped files, they do nothing for them.",
            make: &[
                "sysctl vm.swappiness vm.vfs_cache_pressure vm.watermark_scale_factor   # remember them",
                "sysctl -w vm.swappiness=1",
            ],
            undo: &["sysctl -w vm.swappiness=VALUE_REMEMBERED           # and the others"],
        },
        "prefetch" => ByHand {
            title: "the hardware prefetcher",
            note: "Intel, from Nehalem on; other processors have other registers. Writing one marks the kernel as tainted until \
                   the next boot.",
            make: &[
                "rdmsr -a 0x1a4                                     # remember it",
                "wrmsr -a 0x1a4 0xf                                 # prefetchers off",
            ],
            undo: &["wrmsr -a 0x1a4 VALUE_REMEMBERED"],
        },
        _ => return None,
    };
    Some(way)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strategy_has_its_way_by_hand() {
        let machine = homeostat_daemon::wiring::diagnose(None).expect("this machine can be described");
        for strategy in machine.strategies {
            let way = of(&strategy.id).unwrap_or_else(|| panic!("{} has none", strategy.id));
            assert!(!way.title.is_empty() && !way.make.is_empty() && !way.undo.is_empty());
        }
        assert!(of("something else").is_none());
    }
}

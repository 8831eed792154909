use super::*;

fn layer(text: &str) -> Layer {
    Layer {
        name: "test.toml".into(),
        text: text.into(),
    }
}

fn merged(texts: &[&str]) -> Result<Loaded, Vec<SettingsError>> {
    let layers: Vec<Layer> = texts.iter().map(|t| layer(t)).collect();
    let mut errors = Vec::new();
    match merge(&layers, |_| Vec::new(), &mut errors) {
        Some(loaded) if errors.is_empty() => Ok(loaded),
        _ => Err(errors),
    }
}

fn only_error(text: &str) -> SettingsError {
    let mut errors = merged(&[text]).unwrap_err();
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0)
}

#[test]
fn nothing_at_all_gives_the_defaults() {
    let loaded = merged(&[]).unwrap();
    assert_eq!(loaded.settings, Settings::default());
    assert!(!loaded.seed_given);
    assert!(merged(&["[policy]\nseed = 7\n"]).unwrap().seed_given);
}

#[test]
fn an_unknown_setting_is_named_with_its_place_and_the_likely_one() {
    let e = only_error("[policy]\nobserve_min_s = 20\nage_mins = 5\n");
    assert_eq!(
        (e.line, e.column, e.key.as_str(), e.value.as_str()),
        (3, 1, "policy.age_mins", "5")
    );
    assert_eq!(e.problem, "unknown setting `age_mins`");
    assert!(e.remedy.contains("`age_min_s`"), "{}", e.remedy);
}

#[test]
fn an_unknown_section_is_named() {
    let e = only_error("[polcy]\nage_min_s = 5\n");
    assert_eq!((e.line, e.key.as_str()), (1, "polcy"));
    assert!(e.remedy.contains("`policy`"), "{}", e.remedy);
}

#[test]
fn a_setting_in_the_wrong_section_is_sent_to_the_right_one() {
    let e = only_error("[service]\nstate_directory = \"/x\"\n");
    assert!(e.remedy.contains("paths.state_directory"), "{}", e.remedy);
}

#[test]
fn settings_of_strategies_are_checked_by_name_and_range() {
    for right in ["give_back = 0", "give_back = 1.0", "limit_mib = 64"] {
        merged(&[&format!("[policy.settings]\nfile_cache = {{ {right} }}\n")]).unwrap();
    }
    let e = only_error("[policy.settings]\nfile_cache = { bring_bak = 0 }\n");
    assert_eq!(
        (e.line, e.key.as_str()),
        (2, "policy.settings.file_cache.bring_bak")
    );
    assert!(e.remedy.contains("bring_back"), "{}", e.remedy);
    let e = only_error("[policy.settings]\nfilecache = { bring_back = 0 }\n");
    assert!(e.line == 2 && e.remedy.contains("file_cache"), "{e}");
    for wrong in ["give_back = 2", "faults_min = -1", "faults_min = nan"] {
        let e = only_error(&format!("[policy.settings]\nfile_cache = {{ {wrong} }}\n"));
        assert!(e.line == 2 && e.problem.contains("must be from"), "{e}");
    }
    let listed = super::catalogue::default_file();
    assert!(listed.contains("file_cache = { bring_back = 1 }"), "{listed}");
}

#[test]
fn a_wrong_type_is_named_with_an_example() {
    let e = only_error("[policy]\n\nage_min_s = \"soon\"\n");
    assert_eq!(
        (e.line, e.column, e.key.as_str(), e.value.as_str()),
        (3, 13, "policy.age_min_s", "\"soon\"")
    );
    assert!(e.problem.contains("invalid type"), "{}", e.problem);
    assert_eq!(e.remedy, "write for example: age_min_s = 10.0");
}

#[test]
fn a_wrong_type_deep_in_a_rule_is_named() {
    let e = only_error("[[policy.workloads]]\nmatch = \"a\"\nnever = \"yes\"\n");
    assert_eq!((e.line, e.key.as_str()), (3, "policy.workloads.never"));
    assert_eq!(e.remedy, "write for example: never = true");
}

#[test]
fn broken_toml_is_named_with_its_place() {
    let e = only_error("[policy]\nage_min_s = = 5\n");
    assert_eq!(e.line, 2);
    assert!(e.remedy.contains("not TOML"), "{}", e.remedy);
}

#[test]
fn a_value_out_of_range_is_named_where_it_was_written_last() {
    let layers = [
        layer("[policy]\ncpu_min = 0.5\n"),
        Layer {
            name: "b.toml".into(),
            text: "policy.cpu_min = -1\n".into(),
        },
    ];
    let mut errors = Vec::new();
    merge(&layers, |_| Vec::new(), &mut errors);
    assert_eq!(errors.len(), 1);
    let e = &errors[0];
    assert_eq!(
        (e.file.as_str(), e.line, e.column, e.value.as_str()),
        ("b.toml", 1, 18, "-1")
    );
    assert_eq!(e.problem, "must be between 0 and 10000");
    assert_eq!(e.remedy, "the default is 0.05");
    assert_eq!(
        e.to_string(),
        "b.toml:1:18: policy.cpu_min = -1: must be between 0 and 10000\n  hint: the default is 0.05"
    );
}

#[test]
fn of_two_settings_in_the_wrong_order_the_one_that_was_written_is_named() {
    let e = only_error("[policy]\nobserve_min_s = 5000\n");
    assert_eq!(
        (e.line, e.key.as_str(), e.value.as_str()),
        (2, "policy.observe_min_s", "5000")
    );
    assert_eq!(e.problem, "must not be above policy.observe_max_s, which is 1200");
    let e = only_error("[policy]\nwashout_max_s = 0.2\n");
    assert_eq!((e.line, e.key.as_str()), (2, "policy.washout_max_s"));
    assert_eq!(e.problem, "must not be below policy.washout_min_s, which is 0.5");
    // Both were written: the later one, and a later file is later than a later line.
    let e = only_error("[policy]\nwashout_max_s = 3\nwashout_min_s = 4\n");
    assert_eq!((e.line, e.key.as_str()), (3, "policy.washout_min_s"));
    let errors = merged(&[
        "[policy]\nage_min_s = 3\nwashout_min_s = 70\nwashout_max_s = 80\n",
        "policy.washout_max_s = 50\n",
    ]);
    let e = &errors.unwrap_err()[0];
    assert_eq!((e.line, e.key.as_str()), (1, "policy.washout_max_s"));
    let e = only_error("[policy.trial]\ndelta = 0.005\n");
    assert_eq!(e.key, "policy.trial.delta");
}

#[test]
fn ranges_are_checked_in_the_sections_of_the_policy_too() {
    let errors = merged(&["[policy.trial]\nalpha = 2\n[policy.discovery]\nkind = \"spending\"\ntotal = 7\n"]);
    let errors = errors.unwrap_err();
    let places: Vec<(usize, &str)> = errors.iter().map(|e| (e.line, e.key.as_str())).collect();
    assert_eq!(places, [(2, "policy.trial.alpha"), (5, "policy.discovery.total")]);
}

#[test]
fn all_complaints_come_at_once() {
    let errors =
        merged(&["[policy]\ncpu_min = -1\nwashout_min_s = 1e9\n[paths]\nrun_directory = \"here\"\n"]);
    let keys: Vec<String> = errors.unwrap_err().into_iter().map(|e| e.key).collect();
    assert!(
        keys.contains(&"policy.cpu_min".into()) && keys.contains(&"policy.washout_min_s".into()),
        "{keys:?}"
    );
    assert!(keys.contains(&"paths.run_directory".into()), "{keys:?}");
}

#[test]
fn later_layers_win_and_their_rules_come_first() {
    let loaded = merged(&[
        "[policy]\nage_min_s = 5\ncpu_min = 0.1\n[[policy.workloads]]\nmatch = \"a\"\nnever = true\n",
        "[policy]\nage_min_s = 6\n[[policy.workloads]]\nmatch = \"b\"\nalways = true\n",
    ])
    .unwrap();
    assert_eq!(
        (loaded.settings.policy.age_min_s, loaded.settings.policy.cpu_min),
        (6.0, 0.1)
    );
    let patterns: Vec<&str> = loaded
        .settings
        .policy
        .workloads
        .iter()
        .map(|r| r.pattern.as_str())
        .collect();
    assert_eq!(patterns, ["b", "a"]);
}

#[test]
fn set_takes_toml_or_text_and_defaults_to_the_policy() {
    for (set, expected) in [
        ("age_min_s=5", "policy.age_min_s = 5\n"),
        (
            "paths.state_directory=/tmp/x",
            "paths.state_directory = \"/tmp/x\"\n",
        ),
        (
            "measured_candidates_s=[4,6]",
            "policy.measured_candidates_s = [4,6]\n",
        ),
        ("policy.mode=advise-only", "policy.mode = \"advise-only\"\n"),
    ] {
        let layer = set_layer(set).unwrap();
        assert_eq!(layer.text, expected);
        assert!(check_layer(&layer).is_ok(), "{set}");
    }
    assert!(set_layer("nothing").is_err());
    let layer = set_layer("age_min=5").unwrap();
    let e = check_layer(&layer).unwrap_err();
    assert_eq!(e.file, "--set age_min=5");
    assert!(e.remedy.contains("age_min_s"), "{}", e.remedy);
}

#[test]
fn rules_that_contradict_themselves_and_odd_meters_are_refused() {
    let e = only_error("[[policy.workloads]]\nmatch = \"a\"\nnever = true\nalways = true\n");
    assert!(e.problem.contains("both never and always"));
    for meter in [
        "redis",
        "uprobe:f",
        "uprobe::f",
        "uprobe:bin/shop:f",
        "uprobe:/usr/bin/redis-server:",
        "usdt:/x:y",
        "usdt:x::y",
        "prometheus:https://x",
    ] {
        let e = only_error(&format!("[meters.configured]\nshop = [\"{meter}\"]\n"));
        assert_eq!((e.line, e.key.as_str()), (2, "meters.configured.shop"), "{meter}");
    }
    // As `homeostat meter test` names them, too.
    for meter in [
        "uprobe:/bin/shop:checkout",
        "uprobe:shop:checkout",
        "usdt:postgres:postgresql:transaction__commit",
        "usdt:/usr/lib/libshop.so:shop:done",
    ] {
        let text = format!("[meters.configured]\nshop = [\"{meter}\"]\n");
        assert!(merged(&[&text]).is_ok(), "{meter}");
    }
}

/// A configuration with these meters of the workload `shop`.
fn shop(meters: &str) -> String {
    format!("[meters.configured]\nshop = [{meters}]\n")
}

/// A meter of which a person says what one count is.
fn counts(unit: &str) -> String {
    format!("{{ meter = \"uprobe:shop:f\", unit = \"{unit}\" }}")
}

#[test]
fn a_meter_may_say_what_one_count_is() {
    let forty = "ö".repeat(40);
    for (meters, unit) in [
        ("\"uprobe:shop:f\"".to_owned(), None),
        ("{ meter = \"uprobe:shop:f\" }".to_owned(), None),
        (counts("order"), Some("order")),
        (counts("HTTP request"), Some("HTTP request")),
        (counts(&forty), Some(forty.as_str())),
        (
            format!("\"usdt:shop:shop:done\", {}", counts("order")),
            Some("order"),
        ),
        (format!("{0}, {0}", counts("order")), Some("order")),
    ] {
        let settings = merged(&[&shop(&meters)]).unwrap().settings;
        let last = settings.meters.configured["shop"].last().unwrap();
        let expected = ("uprobe:shop:f", unit);
        assert_eq!((last.meter.as_str(), last.unit.as_deref()), expected, "{meters}");
    }
}

#[test]
fn what_is_wrong_with_a_unit_is_named_with_its_place_and_the_remedy() {
    let long = "ö".repeat(41);
    for (meters, problem) in [
        (counts(""), "the unit \"\" is blank".to_owned()),
        (counts(" \\t"), "the unit \" \\t\" is blank".to_owned()),
        (
            counts("or\\u001bder"),
            "the unit \"or\\u{1b}der\" has a control character in it".to_owned(),
        ),
        (
            counts(&long),
            format!("the unit \"{long}\" is longer than 40 characters"),
        ),
    ] {
        let e = only_error(&shop(&meters));
        assert_eq!(
            (e.line, e.key.as_str()),
            (2, "meters.configured.shop"),
            "{meters}"
        );
        assert_eq!(e.problem, problem);
        assert!(e.remedy.contains("unit = \"order\""), "{}", e.remedy);
    }
    // What the parser complains about.
    for (meters, key, problem) in [
        (
            "{ meter = \"m\", cost = 1 }",
            "shop.cost",
            "unknown setting `cost`",
        ),
        (
            "{ meter = \"m\", Unit = 1 }",
            "shop.Unit",
            "unknown setting `Unit`",
        ),
        (
            "{ meter = \"m\", unit = 5 }",
            "shop.unit",
            "invalid type: integer `5`",
        ),
        ("{ unit = \"order\" }", "shop", "missing field `meter`"),
        ("5", "shop", "invalid type: integer `5`"),
    ] {
        let e = only_error(&shop(meters));
        assert_eq!((e.file.as_str(), e.line), ("test.toml", 2), "{meters}");
        let key = format!("meters.configured.{key}");
        assert!(e.key.starts_with(&key) && e.problem.starts_with(problem), "{e}");
        assert_eq!(e.remedy, METERS_REMEDY);
    }
}

#[test]
fn two_units_of_one_meter_are_both_named() {
    let e = only_error(&shop(&format!("{}, {}", counts("order"), counts("page"))));
    assert_eq!((e.line, e.key.as_str()), (2, "meters.configured.shop"));
    assert_eq!(
        e.problem,
        "says that one count of \"uprobe:shop:f\" is \"order\", and that it is \"page\""
    );
    let two = format!("{}\"shop*\" = [{}]\n", shop(&counts("order")), counts("page"));
    let e = only_error(&two);
    assert_eq!((e.line, e.key.as_str()), (3, "meters.configured.shop*"));
    assert_eq!(
        e.problem,
        "says that one count of \"uprobe:shop:f\" is \"page\", and \"shop\" that it is \"order\""
    );
    // A later file replaces the meters of a workload, however they are written.
    let settings = merged(&[&shop(&counts("order")), &shop(&counts("page"))])
        .unwrap()
        .settings;
    let units: Vec<Option<&str>> = settings.meters.configured["shop"]
        .iter()
        .map(|entry| entry.unit.as_deref())
        .collect();
    assert_eq!(units, [Some("page")]);
}

#[test]
fn files_and_drop_ins_are_read_in_order_and_a_missing_named_file_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let main = directory.path().join("homeostat.toml");
    let missing = load(&Sources {
        file: Some(main.clone()),
        set: vec![],
    })
    .unwrap_err();
    assert!(missing.to_string().contains("can not be read"), "{missing}");
    std::fs::write(
        &main,
        "[policy]\nage_min_s = 1\ncpu_min = 0.2\nscan_interval_s = 2\n",
    )
    .unwrap();
    let drop_ins = directory.path().join("homeostat.d");
    std::fs::create_dir(&drop_ins).unwrap();
    std::fs::write(drop_ins.join("20.toml"), "policy.age_min_s = 3").unwrap();
    std::fs::write(
        drop_ins.join("10.toml"),
        "policy.age_min_s = 2\npolicy.cpu_min = 0.3",
    )
    .unwrap();
    std::fs::write(drop_ins.join("30.toml.off"), "not toml at all").unwrap();
    let loaded = load(&Sources {
        file: Some(main.clone()),
        set: vec!["scan_interval_s=4".into()],
    })
    .unwrap();
    let policy = &loaded.settings.policy;
    assert_eq!(
        (policy.age_min_s, policy.cpu_min, policy.scan_interval_s),
        (3.0, 0.3, 4.0)
    );
    assert_eq!(loaded.layers.len(), 4);
}

#[test]
fn what_is_shown_can_be_read_again() {
    let loaded = merged(&[
        "[policy]\nmode = \"advise-only\"\n[[policy.workloads]]\nmatch = \"a\"\nnever = true\n[meters.configured]\nb = \
         [\"uprobe:/bin/b:f\"]\nc = [\"uprobe:c:f\", { meter = \"uprobe:c:g\", unit = \"order\" }]\n\"d.service\" = \
         [{ meter = \"uprobe:d:f\", unit = \"page\" }]\ne = [\"uprobe:e:f\"]\n",
    ])
    .unwrap();
    let shown = show(&loaded.settings);
    assert_eq!(toml::from_str::<Settings>(&shown).unwrap(), loaded.settings);
    assert!(shown.contains("\nb = [\"uprobe:/bin/b:f\"]\n"), "{shown}");
}

//! The schema, as the list of migration steps. Never edit a released step: a change is a new step at the end. `PRAGMA
//! user_version` counts the steps taken. Unsigned 64-bit numbers (seeds, nanoseconds, bytes) are stored as the signed
//! integer with the same bits. NaN is NULL. `_unix` columns are seconds since the epoch.

pub(super) const MIGRATIONS: &[&str] = &[
    // 1: what was tried
    "CREATE TABLE meta (
        key TEXT PRIMARY KEY,
        value INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE machines (
        id INTEGER PRIMARY KEY,
        fingerprint TEXT NOT NULL UNIQUE
    ) STRICT;
    CREATE TABLE workloads (
        id INTEGER PRIMARY KEY,
        fingerprint TEXT NOT NULL UNIQUE
    ) STRICT;
    CREATE TABLE experiments (
        id INTEGER PRIMARY KEY,
        machine INTEGER NOT NULL REFERENCES machines (id),
        workload INTEGER NOT NULL REFERENCES workloads (id),
        workload_name TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('switchback', 'staged_rollout', 'placebo')),
        strategy TEXT NOT NULL,
        action INTEGER NOT NULL,
        hypothesis TEXT NOT NULL,
        predicted_estimate REAL,
        predicted_lower REAL,
        predicted_upper REAL,
        predicted_confidence REAL,
        meter TEXT NOT NULL,
        objective TEXT NOT NULL,
        seed INTEGER NOT NULL,
        alpha REAL,
        washout_ns INTEGER NOT NULL,
        measured_ns INTEGER NOT NULL,
        started_unix INTEGER NOT NULL,
        ended_unix INTEGER NOT NULL,
        verdict TEXT CHECK (verdict IN ('accepted', 'rejected', 'harmful', 'inconclusive', 'aborted')),
        reason TEXT NOT NULL,
        has_effect INTEGER NOT NULL CHECK (has_effect IN (0, 1)),
        effect_estimate REAL,
        effect_lower REAL,
        effect_upper REAL,
        effect_confidence REAL,
        evidence REAL,
        stalled_ns INTEGER NOT NULL,
        bloat_bytes INTEGER NOT NULL,
        harm_exposure REAL
    ) STRICT;
    CREATE INDEX experiments_by_workload ON experiments (workload, strategy);
    CREATE INDEX experiments_by_start ON experiments (started_unix);
    CREATE TABLE blocks (
        experiment INTEGER NOT NULL REFERENCES experiments (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        change_on INTEGER NOT NULL CHECK (change_on IN (0, 1)),
        measured_from_ns INTEGER NOT NULL,
        measured_ns INTEGER NOT NULL,
        work REAL,
        cpu_ns INTEGER NOT NULL,
        score REAL,
        broken INTEGER NOT NULL CHECK (broken IN (0, 1)),
        PRIMARY KEY (experiment, position)
    ) STRICT, WITHOUT ROWID;",
    // 2: what was seen and decided
    "CREATE TABLE windows (
        id INTEGER PRIMARY KEY,
        machine INTEGER NOT NULL REFERENCES machines (id),
        workload INTEGER NOT NULL REFERENCES workloads (id),
        workload_name TEXT NOT NULL,
        started_unix INTEGER NOT NULL,
        length_ns INTEGER NOT NULL,
        samples INTEGER NOT NULL,
        meter TEXT,
        work REAL,
        variation REAL,
        cpu_ns INTEGER NOT NULL,
        runqueue_wait_ns INTEGER NOT NULL,
        faults_minor INTEGER NOT NULL,
        faults_major INTEGER NOT NULL,
        resident_bytes INTEGER NOT NULL,
        anonymous_bytes INTEGER NOT NULL,
        shared_bytes INTEGER NOT NULL,
        huge_bytes INTEGER
    ) STRICT;
    CREATE INDEX windows_by_start ON windows (started_unix);
    CREATE INDEX windows_by_workload ON windows (workload, started_unix);
    CREATE TABLE decisions (
        id INTEGER PRIMARY KEY,
        at_unix INTEGER NOT NULL,
        workload_name TEXT,
        stage TEXT NOT NULL,
        sentence TEXT NOT NULL,
        numbers TEXT NOT NULL
    ) STRICT;
    CREATE INDEX decisions_by_time ON decisions (at_unix);
    CREATE INDEX decisions_by_workload ON decisions (workload_name, at_unix);",
    // 3: what is known before the next try
    "CREATE VIEW priors AS
        SELECT
            machines.fingerprint AS machine,
            workloads.fingerprint AS fingerprint,
            experiments.strategy AS strategy,
            SUM(verdict = 'accepted') AS accepted,
            SUM(verdict = 'rejected') AS rejected,
            SUM(verdict = 'harmful') AS harmful,
            SUM(verdict = 'inconclusive') AS inconclusive,
            SUM(verdict = 'aborted') AS aborted,
            MAX(CASE WHEN verdict <> 'aborted' THEN experiments.id END) AS last_experiment
        FROM experiments
        JOIN machines ON machines.id = experiments.machine
        JOIN workloads ON workloads.id = experiments.workload
        WHERE kind <> 'placebo' AND verdict IS NOT NULL
        GROUP BY machines.id, workloads.id, experiments.strategy;",
    // 4: several workloads tried as one change
    "CREATE TABLE experiment_others (
        experiment INTEGER NOT NULL REFERENCES experiments (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        workload INTEGER NOT NULL REFERENCES workloads (id),
        workload_name TEXT NOT NULL,
        PRIMARY KEY (experiment, position)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX experiment_others_by_workload ON experiment_others (workload);
    DROP VIEW priors;
    CREATE VIEW priors AS
        WITH members (experiment, workload) AS (
            SELECT id, workload FROM experiments
            UNION
            SELECT experiment, workload FROM experiment_others
        )
        SELECT
            machines.fingerprint AS machine,
            workloads.fingerprint AS fingerprint,
            experiments.strategy AS strategy,
            SUM(verdict = 'accepted') AS accepted,
            SUM(verdict = 'rejected') AS rejected,
            SUM(verdict = 'harmful') AS harmful,
            SUM(verdict = 'inconclusive') AS inconclusive,
            SUM(verdict = 'aborted') AS aborted,
            MAX(CASE WHEN verdict <> 'aborted' THEN experiments.id END) AS last_experiment
        FROM members
        JOIN experiments ON experiments.id = members.experiment
        JOIN machines ON machines.id = experiments.machine
        JOIN workloads ON workloads.id = members.workload
        WHERE kind <> 'placebo' AND verdict IS NOT NULL
        GROUP BY machines.id, workloads.id, experiments.strategy;",
    // 5: what a trial of several workloads showed of each
    "CREATE TABLE experiment_members (
        experiment INTEGER NOT NULL REFERENCES experiments (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        workload INTEGER NOT NULL REFERENCES workloads (id),
        workload_name TEXT NOT NULL,
        verdict TEXT NOT NULL,
        has_effect INTEGER NOT NULL,
        effect_estimate REAL,
        effect_lower REAL,
        effect_upper REAL,
        effect_confidence REAL,
        PRIMARY KEY (experiment, position)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX experiment_members_by_workload ON experiment_members (workload);
    DROP VIEW priors;
    CREATE VIEW priors AS
        WITH tried (experiment, workload) AS (
            SELECT id, workload FROM experiments
            UNION
            SELECT experiment, workload FROM experiment_others
        ),
        judged (experiment, workload, verdict) AS (
            SELECT tried.experiment, tried.workload, COALESCE(
                (SELECT m.verdict FROM experiment_members m
                 WHERE m.experiment = tried.experiment AND m.workload = tried.workload
                 ORDER BY m.position LIMIT 1),
                experiments.verdict)
            FROM tried JOIN experiments ON experiments.id = tried.experiment
            WHERE kind <> 'placebo' AND experiments.verdict IS NOT NULL
        )
        SELECT
            machines.fingerprint AS machine,
            workloads.fingerprint AS fingerprint,
            workloads.id AS workload,
            experiments.strategy AS strategy,
            SUM(judged.verdict = 'accepted') AS accepted,
            SUM(judged.verdict = 'rejected') AS rejected,
            SUM(judged.verdict = 'harmful') AS harmful,
            SUM(judged.verdict = 'inconclusive') AS inconclusive,
            SUM(judged.verdict = 'aborted') AS aborted,
            MAX(CASE WHEN judged.verdict <> 'aborted' THEN experiments.id END) AS last_experiment
        FROM judged
        JOIN experiments ON experiments.id = judged.experiment
        JOIN machines ON machines.id = experiments.machine
        JOIN workloads ON workloads.id = judged.workload
        GROUP BY machines.id, workloads.id, experiments.strategy;",
    // 6: the limited reader
    "ALTER TABLE experiments ADD COLUMN reader TEXT;
    CREATE INDEX experiments_by_reader ON experiments (reader) WHERE reader IS NOT NULL;",
    // 7: what a second meter said of a trial; nothing reads or writes it any more
    "CREATE TABLE experiment_witnesses (
        experiment INTEGER PRIMARY KEY REFERENCES experiments (id) ON DELETE CASCADE,
        meter TEXT NOT NULL,
        blocks INTEGER NOT NULL,
        effect_estimate REAL,
        effect_lower REAL,
        effect_upper REAL,
        effect_confidence REAL,
        judge_estimate REAL,
        judge_lower REAL,
        judge_upper REAL,
        judge_confidence REAL,
        difference_estimate REAL,
        difference_lower REAL,
        difference_upper REAL,
        difference_confidence REAL
    ) STRICT;",
    // 8: run-to-block times of the tried workloads: a JSON array
    "ALTER TABLE experiments ADD COLUMN spans TEXT;",
    // 9: whether the meters that judged kept their meaning: a JSON array
    "ALTER TABLE experiments ADD COLUMN meanings TEXT;",
    // 10: what was waited for meanwhile: a JSON array; nothing reads or writes it any more
    "ALTER TABLE experiments ADD COLUMN waits TEXT;",
    // 11: what pairs of blocks after the acceptance show: a JSON object
    // … and the time constant with which the effect set in
    "ALTER TABLE experiments ADD COLUMN fresh TEXT;
    ALTER TABLE experiments ADD COLUMN settling_ns INTEGER;",
    // 12: the level without the change against the level before the trial: a JSON object
    // … and the losses that an accepted trial does not exclude: a JSON array
    "ALTER TABLE experiments ADD COLUMN off_level TEXT;
    ALTER TABLE experiments ADD COLUMN not_excluded TEXT;",
];

/// The version of a database that has taken all steps.
pub(super) const LATEST: u32 = MIGRATIONS.len() as u32;

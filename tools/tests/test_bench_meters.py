"""The arithmetic of tools/bench-meters, from which the figures of docs/meters.md come, on readings that are made up."""

import argparse
import importlib.machinery
import importlib.util
import math
import random
import subprocess
import sys
import tempfile
import time
import tomllib
import types
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent
# It imports what lies beside it, and leaves no compiled file there.
sys.path.insert(0, str(TOOLS))
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("bench_meters", str(TOOLS / "bench-meters"))
bench = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_meters", loader))
loader.exec_module(bench)

UNITS_PER_S = 200.0


def line(rate, begin, end, step=0.1):
    """A counter that grows at that rate, read every so many seconds."""
    return [(begin + i * step, rate * i * step) for i in range(int((end - begin) / step) + 1)]


def record(begin=-1.0, end=100.0):
    return bench.Record(line(UNITS_PER_S, begin, end), line(1.0, begin, end))


def readings(per_unit, begin, end, cpu_per_s=1.0):
    """One each second, of a meter that counts so many for each unit."""
    return [
        {"at_s": t + 1.0, "seconds": 1.0, "work": per_unit * UNITS_PER_S, "cpu_s": cpu_per_s}
        for t in range(int(begin), int(end))
    ]


def meter(*levels, **more):
    """Counts per unit in levels of twenty seconds."""
    found = []
    for i, per_unit in enumerate(levels):
        found += readings(per_unit, 20 * i, 20 * i + 20)
    return {"readings": found, "taken": True, "class": "points", **more}


LEVELS = [(0, 20), (20, 40), (40, 60)]


class ErrorUnderLoads(unittest.TestCase):
    def test_is_the_largest_change_between_any_two_loads(self):
        # Against the first alone it would be 2 %.
        error = bench.error_of(meter(1.00, 1.02, 0.99), LEVELS, record())
        self.assertAlmostEqual(error, 1.02 / 0.99 - 1, places=6)

    def test_is_not_known_where_a_load_was_not_counted(self):
        one = meter(1.0, 1.0)
        self.assertIsNone(bench.error_of(one, LEVELS, record()))

    def test_what_was_done_while_nothing_was_read_is_in_neither(self):
        one = meter(1.0)
        del one["readings"][5:9]
        whole, _ = bench.ratios(one, 0, 20, record())
        self.assertAlmostEqual(whole, 1.0, places=6)

    def test_noise_is_that_of_blocks_of_five_seconds(self):
        one = {"readings": readings(1.1, 0, 5) + readings(0.9, 5, 10) + readings(1.1, 10, 15) + readings(0.9, 15, 20)}
        per_unit, error, _, noise = bench.figures(one, [(0, 20)], record())
        self.assertAlmostEqual(per_unit, 1.0, places=6)
        self.assertAlmostEqual(error, 0.0, places=6)
        self.assertAlmostEqual(noise, 0.1 * math.sqrt(4 / 3), places=6)


class IntervalOfTheError(unittest.TestCase):
    def test_is_that_of_games_and_howell(self):
        # Blocks of .99 and 1.01 (by logarithm), twice in each level: a variance of .0001 x 4 / 3, by Welch six degrees of freedom.
        noise = [math.exp(x) for x in (-0.01, 0.01) * 2]
        some = [r for i in range(12) for r in readings((1.05 if i >= 8 else 1.0) * noise[i % 4], 5 * i, 5 * i + 5)]
        low, high = bench.error_interval({"readings": some}, LEVELS, record())
        half = 4.34 * math.sqrt(0.0001 * 4 / 3 / 4)
        self.assertAlmostEqual(low, 1.05 * math.exp(-half) - 1, places=6)
        self.assertAlmostEqual(high, 1.05 * math.exp(half) - 1, places=6)

    def test_contains_nothing_where_levels_differ_by_chance(self):
        source, contained = random.Random(7), 0
        for _ in range(200):
            some = [r for i in range(12) for r in readings(math.exp(source.gauss(0, 0.03)), 5 * i, 5 * i + 5)]
            low, high = bench.error_interval({"readings": some}, LEVELS, record())
            self.assertLess(low, high)
            contained += low == 0.0
        # Of 200 at 95 %: 190, and three standard errors are 9.
        self.assertTrue(181 <= contained <= 199, contained)

    def test_is_wider_by_the_level_that_varies_more(self):
        some = [r for i in range(12) for r in readings(math.exp((-1) ** i * (0.05 if i >= 8 else 0.001)), 5 * i, 5 * i + 5)]
        _, high = bench.error_interval({"readings": some}, LEVELS, record())
        # As good as all of it is of the third, with its three degrees of freedom.
        self.assertAlmostEqual(math.log1p(high), 5.91 * math.sqrt(0.05**2 * 4 / 3 / 4 / 2), places=2)

    def test_is_not_known_where_a_block_counted_nothing_or_is_alone(self):
        one = meter(1.0, 1.0, 1.0)
        for r in one["readings"][5:10]:
            r["work"] = 0.0
        self.assertIsNone(bench.error_interval(one, LEVELS, record()))
        self.assertIsNone(bench.error_interval(meter(1.0, 1.0, 1.0), [(0, 20), (20, 29), (40, 60)], record()))


class Treatment(unittest.TestCase):
    def blocks(self, pairs=8):
        """Pairs of blocks of ten seconds, on and off."""
        return [
            {"pair": i // 2, "on": i % 2 == 0, "begin": 10.0 * i, "end": 10.0 * i + 10.0} for i in range(2 * pairs)
        ]

    def played(self, told, true, pairs=8):
        """A change by which work grows to `true` times by truth and to `told` times by the meter."""
        # As in a run it is read before the first block and after the last.
        points, cpu, work, reads = [(-1.0, -UNITS_PER_S), (0.0, 0.0)], [(-1.0, -1.0), (0.0, 0.0)], 0.0, []
        for block in self.blocks(pairs):
            for second in range(10):
                rate = UNITS_PER_S * (true if block["on"] else 1.0)
                work += rate
                at = block["begin"] + second + 1.0
                points.append((at, work))
                cpu.append((at, at))
                said = UNITS_PER_S * (told if block["on"] else 1.0)
                reads.append({"at_s": at, "seconds": 1.0, "work": said, "cpu_s": 1.0})
        points.append((points[-1][0] + 1.0, work + UNITS_PER_S))
        cpu.append((cpu[-1][0] + 1.0, cpu[-1][0] + 1.0))
        return {"readings": reads}, self.blocks(pairs), bench.Record(points, cpu)

    def test_a_meter_that_tells_it_rightly_is_within_the_goal(self):
        found = bench.judged(bench.effects(*self.played(1.2, 1.2)))
        self.assertEqual((found["goal"], found["pairs"]), ("yes", 8))
        self.assertAlmostEqual(found["truth_percent"][0], 20.0, places=6)
        self.assertAlmostEqual(found["error_points"][0], 0.0, places=6)

    def test_one_that_is_three_points_off_is_not(self):
        found = bench.judged(bench.effects(*self.played(1.23, 1.2)))
        self.assertEqual(found["goal"], "no")
        # Points of the work without the change: 23 % for 20 %.
        self.assertAlmostEqual(found["error_points"][0], 3.0, places=6)

    def test_one_that_scatters_across_a_point_is_open(self):
        errors = [0.02, -0.02] * 4
        found = bench.judged([{"truth": 0.1, "meter": 0.1 + e} for e in errors])
        self.assertEqual(found["goal"], "open")

    def test_as_many_pairs_begin_with_on_as_with_off(self):
        for seed in range(20):
            self.assertEqual(sum(bench.order(18, random.Random(seed))), 9)

    def test_the_interval_is_that_of_student(self):
        # By the table: t(.975) is 12.706 with one degree of freedom, 2.365 with seven.
        self.assertAlmostEqual(bench.interval([0.0, 2.0])[1], 12.706, places=2)
        mean, half = bench.interval([1.0, 3.0] * 4)
        self.assertAlmostEqual(mean, 2.0)
        self.assertAlmostEqual(half, 2.365 * math.sqrt(8 / 7) / math.sqrt(8), places=3)


class Cost(unittest.TestCase):
    def counting(self):
        blocks = [
            {"pair": i // 2, "on": i % 2 == 0, "counted": float(i % 2 == 0), "hits_per_cpu_s": 4000.0 * (i % 2 == 0)}
            for i in range(8)
        ]
        return {"blocks": blocks, "effects": [math.log(0.98), math.log(0.97), math.log(0.98), math.log(0.97)]}

    def test_fewer_hits_cost_so_much_less_and_a_loss_is_told_as_one(self):
        mean, low, high = bench.slowed(self.counting(), 1000.0)
        self.assertAlmostEqual(mean, -100 * math.expm1(math.log(0.98 * 0.97) / 2 / 4), places=6)
        self.assertLess(low, mean)
        self.assertGreater(high, mean)
        self.assertGreater(low, 0.0)

    def goal(self, losses, probe_cost_max):
        """Of one program that is counted by points and loses so much (in percent) in blocks."""
        load = {"cpus": 1.0, "meters": [meter(1.0, id="points", rate=4000.0, counted=1.0, cost=0.004)]}
        counting = dict(self.counting(), meter="points", settings={"probe_cost_max": probe_cost_max})
        counting["effects"] = [math.log(1 - x / 100) for x in losses]
        return bench.goal_of_cost({"one": load}, {"one": counting})[0]

    def test_a_small_loss_is_within_the_goal_only_where_coming_and_going_is_in_it(self):
        self.assertIn("**met**", self.goal([0.2, 0.21, 0.19, 0.2], 0.005))
        by_hits = self.goal([0.2, 0.21, 0.19, 0.2], 1.0)
        self.assertIn("**not resolved**", by_hits)
        self.assertIn("of 1 by their hits alone", by_hits)
        self.assertIn("**not resolved**", self.goal([2.0, -1.0, 1.5, -0.5], 0.005))
        for cost_max in (0.005, 1.0):
            self.assertIn("**not met**", self.goal([1.4, 1.41, 1.39, 1.4], cost_max))

    def test_a_block_that_was_on_and_counted_nothing_says_nothing(self):
        blocks = [
            {"pair": 0, "on": True, "begin": 0.0, "end": 9.0, "counted": 0.0},
            {"pair": 0, "on": False, "begin": 10.0, "end": 19.0, "counted": 0.0},
            {"pair": 1, "on": False, "begin": 20.0, "end": 29.0, "counted": 0.0},
            {"pair": 1, "on": True, "begin": 30.0, "end": 39.0, "counted": 1.0},
        ]
        self.assertEqual(len(bench.cost_effects(blocks, record())), 1)


def blocks(meter, arms, by_cpu=False):
    """Of a trial, ten seconds each; `meter` tells what it counts of a unit."""
    made = []
    for i, on in enumerate(arms):
        counted, cpu = meter(on, i) * UNITS_PER_S, 4.0 if by_cpu else 8.0
        made.append({"index": i, "on": on, "broken": False, "measured_from_s": 10.0 * i, "measured_s": 8.0, "work": 8.0 * counted, "cpu_s": cpu, "score": math.log(8.0 * counted / cpu)})
    return made


def trial(made, objective="work per second"):
    return {"objective": objective, "measured_s": 8.0, "blocks": made}


class Trials(unittest.TestCase):
    ARMS = [True, False, False, True, True, False, True, False]

    def test_welchs_interval(self):
        # By hand: 6.5 degrees of freedom, of which the table has six.
        mean, half = bench.difference([5.1, 4.9, 5.6, 5.2], [4.2, 4.8, 4.4, 4.1, 4.6])
        self.assertAlmostEqual(mean, 0.78, places=9)
        self.assertAlmostEqual(half, 2.447 * math.sqrt(0.2943920**2 / 4 + 0.2863564**2 / 5), places=5)
        self.assertEqual(bench.difference([1.0, 1.0], [1.0, 1.0]), (0.0, 0.0))

    def test_a_meter_that_misses_some_of_a_gain_is_wrong_by_that(self):
        # The truth stands still: what the meter says of an effect is all error.
        wiggle = lambda i: 0.0005 * (-1) ** (i // 2)
        found = bench.trial_effects(trial(blocks(lambda on, i: 1.0 + 0.05 * on + wiggle(i), self.ARMS)), record())
        self.assertAlmostEqual(found["truth_percent"][0], 0.0, places=6)
        self.assertAlmostEqual(found["error_points"][0], 5.0, places=1)
        self.assertEqual((found["goal"], found["blocks"]), ("no", [[4, 4], [4, 4]]))
        found = bench.trial_effects(trial(blocks(lambda on, i: 3.0 + wiggle(i), self.ARMS)), record())
        self.assertEqual(found["goal"], "yes", "a constant factor is no error")

    def test_work_is_divided_by_what_the_trial_is_judged_by(self):
        # Half a CPU by the trial's reckoning, and one by the truth's: what the CPU time is off by is the meter's error, too.
        made = trial(blocks(lambda on, i: 1.0, self.ARMS, by_cpu=True), "work per CPU second")
        for block in made["blocks"]:
            block["score"] -= math.log(1.1) if block["on"] else 0.0
        found = bench.trial_effects(made, record())
        self.assertAlmostEqual(found["meter_percent"][0], 100 * (1 / 1.1 - 1), places=6)
        self.assertAlmostEqual(found["error_points"][0], 100 * (1 / 1.1 - 1), places=6)
        made = trial(blocks(lambda on, i: 1.0, self.ARMS))
        self.assertAlmostEqual(bench.trial_effects(made, record())["error_points"][0], 0.0, places=6)

    def test_no_block_is_left_out_for_what_its_meter_says(self):
        made = blocks(lambda on, i: 1.0, self.ARMS)
        # What the breaker has ended, and one in which the meter saw nothing.
        made[0] |= {"broken": True, "measured_s": 2.0}
        made[1] |= {"work": 0.0, "score": math.log(0.5 / 8)}
        found = bench.trial_effects(trial(made), record())
        self.assertEqual((found["blocks"], found["goal"]), ([[4, 4], [4, 4]], "open"))
        self.assertGreater(found["error_points"][0], 100)
        # Some readings were missing: truth is asked of the whole block.
        made = blocks(lambda on, i: 1.0, self.ARMS)
        made[2] |= {"measured_s": 6.0}
        self.assertAlmostEqual(bench.trial_effects(trial(made), record())["error_points"][0], 0.0, places=6)

    def test_what_is_not_compared_is_told(self):
        made = blocks(lambda on, i: 1.0, self.ARMS)
        self.assertEqual(bench.trial_effects(trial(made), record(end=72.0))["blocks"], [[4, 4], [3, 4]])
        found = bench.trial_effects(trial(made), record(end=30.0))
        self.assertEqual(found, {"goal": "open", "blocks": [[1, 4], [2, 4]]})
        told = trial(made) | {"meter": "points", "verdict": "aborted", "started_unix": 1, "ended_unix": 9, "effect": None}
        (row,) = bench.trial_rows("chase", {"experiment": told, "effects": found}, None)
        self.assertIn("| aborted after 8 s | 1 of 4, 2 of 4 | work per second |  |  |  | open |", row)
        self.assertIn("(1 aborted)", bench.trial_summary({"chase": {"experiment": told, "effects": found}})[1])

    def test_the_daemon_sees_its_program_and_no_other(self):
        with tempfile.TemporaryDirectory() as directory:
            ran = []
            subject = types.SimpleNamespace(directory=Path(directory), pid=7, counter=None, spawn=lambda command, **_: ran.append(command))
            daemon = bench.Daemon(subject, argparse.Namespace(homeostat="homeostat", seed=5, limit=60))
            told = tomllib.loads(Path(directory, "homeostat.toml").read_text())
            self.assertEqual(told["policy"]["workloads"], [{"match": "*[7]"}, {"match": "*", "never": True}])
            self.assertEqual(told["policy"]["seed"], 5)
            self.assertNotIn("measured_candidates_s", told["policy"])
            # All that there are, but one.
            known = {path.stem for path in (TOOLS.parent / "docs/strategies").glob("*.md")} - {"autotune"}
            self.assertEqual(set(told["policy"]["strategies"]) | {"large_pages"}, known)
            self.assertFalse(any(told["policy"]["strategies"].values()))
            subject.counter = bench.Told()
            bench.Daemon(subject, argparse.Namespace(homeostat="homeostat", seed=5, limit=60))
            told = tomllib.loads(Path(directory, "homeostat.toml").read_text())
            self.assertEqual(min(told["policy"]["measured_candidates_s"]), bench.TOLD_LEVEL_MIN)
            for path in told["paths"].values():
                self.assertTrue(path.startswith(directory), path)
            self.assertEqual(ran, [])
            daemon.start()
            self.assertEqual(ran[0], ["homeostat", "run", "--config", f"{directory}/homeostat.toml"])
            self.assertTrue(daemon.log.exists())

    def test_the_trial_of_a_daemon_is_waited_for_and_it_is_stopped(self):
        # Has no history at first, then a placebo, then a trial without a verdict, then with one, and when it is stopped another.
        answers = """
import json, pathlib, sys
if sys.argv[1] != "history":
    sys.exit(0)
asked = pathlib.Path(sys.argv[0]).with_name("asked")
n = len(asked.read_text()) if asked.exists() else 0
asked.write_text("x" * (n + 1))
of = lambda number, kind, verdict: {"id": number, "kind": kind, "strategy": "large_pages", "verdict": verdict}
placebo, trial = of(1, "placebo", "rejected"), of(2, "switchback", "accepted" if n > 2 else None)
if n == 0:
    print(json.dumps({"schema": 1, "error": {}}))
    sys.exit(4)
found = [placebo] if n == 1 else [trial, placebo] if n < 4 else [of(3, "switchback", "aborted"), trial, placebo]
if "--blocks" in sys.argv:
    found = [dict(e, blocks=["b"]) for e in found if e["id"] == int(sys.argv[sys.argv.index("--blocks") + 1])]
print(json.dumps({"schema": 1, "experiments": found}))
"""
        with tempfile.TemporaryDirectory() as directory:
            homeostat = Path(directory, "homeostat")
            homeostat.write_text(f"#!{sys.executable}\nimport sys, time\nif sys.argv[1] == 'run':\n import signal\n signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n time.sleep(60)\n{answers}")
            homeostat.chmod(0o755)
            subject = bench.Subject(directory)
            subject.pid = 7
            before, bench.LOOK_S = bench.LOOK_S, 0.05
            try:
                daemon = bench.Daemon(subject, argparse.Namespace(homeostat=str(homeostat), seed=1, limit=30))
                trial = {"id": 2, "kind": "switchback", "strategy": "large_pages", "verdict": "accepted", "blocks": ["b"]}
                self.assertEqual(daemon.run(), trial)
                # Its time is over before: what it says when it is stopped is no verdict of its own.
                asked = Path(directory, "asked")
                for looks, verdict in ((2, None), (5, "aborted")):
                    asked.write_text("x" * looks)
                    homeostat.write_text(homeostat.read_text().replace('"accepted" if n > 2', '"aborted" if n > 4'))
                    found = bench.Daemon(subject, argparse.Namespace(homeostat=str(homeostat), seed=1, limit=0.04)).run()
                    self.assertEqual((found["id"], found["verdict"]), (2, verdict))
                self.assertIsNotNone(daemon.process.poll(), "it is stopped")
                # While it is stopped nothing cuts that short, and it is told afterwards.
                homeostat.write_text(f"#!{sys.executable}\nimport signal, sys, time\nif sys.argv[1] != 'run': sys.exit(4)\n"
                                     "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))\ntime.sleep(60)\n")
                daemon = bench.Daemon(subject, argparse.Namespace(homeostat=str(homeostat), seed=1, limit=1))
                daemon.start()
                time.sleep(0.5)
                with self.assertRaisesRegex(bench.Skip, "minutes"), bench.at_most(0.5):
                    daemon.stop()
                self.assertEqual(daemon.process.poll(), 0)
                # One that ends by itself says why.
                homeostat.write_text(f"#!{sys.executable}\nimport sys\nif sys.argv[1] == 'run': sys.exit('no, thanks')\nsys.exit(4)\n")
                with self.assertRaisesRegex(bench.Skip, "homeostat ended: no, thanks"):
                    bench.Daemon(subject, argparse.Namespace(homeostat=str(homeostat), seed=1, limit=30)).run()
            finally:
                bench.LOOK_S = before
                subject.end()

    def test_a_trial_is_told_with_its_verdict_and_what_the_daemon_said(self):
        trial = {
            "meter": "points", "verdict": "accepted", "started_unix": 100, "ended_unix": 340, "objective": "work per second", "measured_s": 8.0,
            "effect": {"estimate": 0.116, "lower": 0.07, "upper": 0.16, "confidence": 0.9},
            "blocks": blocks(lambda on, i: 1.0, self.ARMS),
        }
        (row,) = bench.trial_rows("chase", {"experiment": trial, "effects": bench.trial_effects(trial, record())}, None)
        self.assertEqual(row.count("|"), len(bench.TRIAL_COLUMNS) + 1)
        self.assertIn("accepted after 240 s | 4, 4 | work per second", row)
        self.assertIn("+11.6 % [+7.0, +16.0] (90 %), the truth is outside |", row)
        inside = dict(trial, effect=dict(trial["effect"], lower=-0.01))
        (within,) = bench.trial_rows("chase", {"experiment": inside, "effects": bench.trial_effects(trial, record())}, None)
        self.assertIn("(90 %), holds the truth |", within)
        both = {"chase": {"experiment": trial, "effects": bench.trial_effects(trial, record())}}
        both["go"] = {"experiment": dict(trial, verdict=None), "effects": dict(both["chase"]["effects"], goal="open")}
        self.assertIn("Of 2 programs of which the daemon has tried large pages (1 without a verdict, 1 accepted) the meter's error of the effect, over the trial's blocks, is within 1 point of: 1 yes, 0 no, 1 not resolved.", bench.trial_summary(both))
        parts = ("load", "counting", "large-pages", "trial")
        book = "\n".join(bench.book({part: both if part == "trial" else {} for part in parts}, {part: {} for part in parts}))
        self.assertIn("## Trials by the daemon", book)
        self.assertIn("| pointer chase, C | points | accepted after 240 s |", book)
        trial |= {"verdict": None, "effect": None}
        (row,) = bench.trial_rows("chase", {"experiment": trial, "effects": bench.trial_effects(trial, record())}, None)
        self.assertIn("none after", row)


class Settings(unittest.TestCase):
    def part(self, treatment, probe_cost_max, **chosen):
        options = argparse.Namespace(
            everything=False, report=False, search=45, level=None, pairs=None, settle=None, memory=None, seed=1, probe_cost_max=probe_cost_max
        )
        vars(options).update(chosen)
        return bench.prepared(options, treatment)

    def test_what_counting_may_cost_is_the_daemons_unless_it_is_chosen(self):
        of = lambda *chosen, **more: bench.settings(self.part(*chosen, **more)).get("probe_cost_max")
        # What was kept before it could be chosen is of the same settings.
        for treatment in (None, "large-pages", "none"):
            self.assertNotIn("probe_cost_max", bench.settings(self.part(treatment, None)))
            self.assertNotIn("probe_cost_max", bench.settings(self.part(treatment, 0.005)))
            self.assertEqual(of(treatment, 1.0), 1.0)
        self.assertEqual(of("counting", None), 1.0)
        self.assertEqual(of("counting", 0.005), 0.005)
        self.assertEqual(self.part("counting", 0.0).probe_cost_max, 0.0, "refused, and not all the time")
        # The goals are asked of what the daemon does.
        self.assertIsNone(of("large-pages", 1.0, everything=True))
        self.assertEqual(of("counting", 0.005, everything=True), 0.005)

    def test_homeostat_is_told_what_counting_may_cost(self):
        with tempfile.TemporaryDirectory() as directory:
            ran = []
            subject = types.SimpleNamespace(directory=Path(directory), pid=7, spawn=lambda command, **_: ran.append(command))
            for probe_cost_max in (None, 0.005, 1.0):
                options = argparse.Namespace(homeostat="homeostat", probe_cost_max=probe_cost_max)
                bench.meter_test(subject, options, 60, None)
                if probe_cost_max is None:
                    self.assertNotIn("--config", ran[-1])
                    continue
                config = ran[-1][ran[-1].index("--config") + 1]
                told = tomllib.loads(Path(config).read_text())
                self.assertEqual(told["meters"]["probe_cost_max"], probe_cost_max)
                self.assertEqual(told["policy"]["meter_cost_max"], max(probe_cost_max, 0.01), "the default at least")


class Told(unittest.TestCase):
    def test_what_pgbench_and_redis_benchmark_tell(self):
        self.assertEqual(bench.transactions("progress: 5.0 s, 8123.4 tps, lat 0.49 ms stddev 0.11, 0 failed\n"), 8123.4)
        self.assertIsNone(bench.transactions("scaling factor: 10\n"))
        text = "GET: rps=0.0 (overall: 176000.0) avg_msec=0.069 (overall: 0.069)\r    \rGET: rps=600320.0 (overall: 598629.5) avg_msec=0.041 (overall: 0.041)\r"
        self.assertEqual(bench.overall(text), 598629.5)
        self.assertIsNone(bench.overall("    \r"))

    def test_the_truth_is_asked_between_what_was_told_and_when(self):
        told = bench.Told()
        told.marks = [(0.0, 0.0), (1.0, 100.0), (2.1, 210.0)]
        self.assertEqual(told(), 210.0)
        self.assertAlmostEqual(bench.Record(told.marks).at(1.55), 155.0)
        self.assertIsNone(bench.Record(told.marks).at(2.2))


# Counts in its memory, behind two marks that lie sixteen bytes apart, and beside that in the size of a file; a copy with the marks does not grow.
REMEMBERS = """
import ctypes, os, sys, time
first, second = map(int, sys.argv[2:])
fd = os.open(sys.argv[1], os.O_RDWR)
copy = (ctypes.c_uint64 * 6)(first, 0, second, 0, 5, 0)
kept = (ctypes.c_uint64 * 6)(first, 0, second, 0, 0, 0)
while True:
    kept[4] += 1
    os.ftruncate(fd, kept[4])
    time.sleep(0.002)
"""


class Memory(unittest.TestCase):
    def test_what_a_program_has_done_is_read_in_its_memory(self):
        with tempfile.TemporaryDirectory() as directory:
            subject = bench.Subject(directory)
            path, marks = subject.length_counter(), [2**40 + 12345, 2**41 + 54321]
            length = subject.counter
            child = subprocess.Popen([sys.executable, "-c", REMEMBERS, path, *map(str, marks)])
            try:
                subject.pid = child.pid
                subject.memory_counter(marks, stride=16)
                for _ in range(5):
                    before, truth, after = length(), subject.truth(), length()
                    self.assertTrue(0 < before <= truth <= after + 1, (before, truth, after))
                    time.sleep(0.02)
                self.assertGreater(length(), before)
            finally:
                subject.end()
                child.kill()
                child.wait()

    def test_a_program_that_keeps_nothing_is_left_out(self):
        with tempfile.TemporaryDirectory() as directory:
            subject = bench.Subject(directory)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            try:
                subject.pid = child.pid
                with self.assertRaisesRegex(bench.Skip, "not found in its memory"):
                    subject.memory_counter([2**40 + 12345, 2**41 + 54321], seconds=0.4)
            finally:
                child.kill()
                child.wait()


class HeldOut(unittest.TestCase):
    def test_no_program_is_in_two_sets(self):
        sets = [bench.PROGRAMS, bench.HELD_OUT, bench.HELD_OUT_AGAIN]
        self.assertEqual(len(bench.ALL), sum(map(len, sets)))
        self.assertEqual(len(bench.HELD_OUT_AGAIN), 12)
        self.assertEqual([programs for _, programs, _ in bench.SETS], sets[1:])
        self.assertEqual(len({bench.title(name) for name in bench.ALL}), len(bench.ALL))

    def test_the_report_tells_the_sets_apart(self):
        def load(error):
            made = meter(1.0, 1.0 + error, 1.0, id="points", rate=200.0, counted=1.0, detectable=0.01, cost=0.001, why="")
            return {"meters": [made], "levels": LEVELS, "truth": record().points, "cpus": 1.0}

        # In no order: that of the table is the report's.
        loads = {"bzip2": load(0.2), "xz": load(0.0), "chase": load(0.0), "gzip": load(0.0), "valkey": load(0.0), "stockfish": load(0.0)}
        results = {"load": loads, "counting": {}, "large-pages": {}}
        lines = bench.book(results, {part: {} for part in results})
        rows = [line.split(" | ")[0].strip("| ") for line in lines if "**points**" in line]
        self.assertEqual(rows, ["pointer chase, C", "gzip", "xz", "Stockfish", "bzip2", "Valkey"])
        text = "\n".join(lines)
        self.assertIn("The second part of the table, 2 from xz to Stockfish, was held out while the rules were made", text)
        self.assertIn("The third part of the table, 2 from bzip2 to Valkey, was held out until 2026-11-28", text)
        goals = text[text.index("* Of programs that were held out until 2026-11-28:") :]
        self.assertIn("1 of 2 programs", goals)
        self.assertNotIn("held out", "\n".join(bench.book({"load": {"gzip": load(0.0)}, "counting": {}, "large-pages": {}}, {part: {} for part in results})))


class Goals(unittest.TestCase):
    def test_the_share_of_programs_and_its_interval(self):
        # By Wilson's formula, of 22 in 24.
        low, high = bench.wilson(22, 24)
        self.assertAlmostEqual(low, 0.742, places=3)
        self.assertAlmostEqual(high, 0.977, places=3)

    def test_a_meter_that_is_wrong_counts_as_one_but_not_as_right(self):
        exactly = (0.0009, 0.0011)
        taken = {f"p{i}": ("kernel", 0.001, exactly) for i in range(18)}
        taken |= {"wrong": ("points", 0.2, (0.1, 0.3)), "none": (None, None, None), bench.IDLE: (None, None, None)}
        have, right = bench.goal_of_programs(taken)
        self.assertIn("19 of 20", have)
        self.assertIn("**met**", have)
        self.assertIn("18 of 20", right)
        self.assertIn("**met**", right)
        self.assertIn("18 are, 1 are not, 0 are not resolved", right)
        taken["p0"] = ("kernel", 0.051, (0.02, 0.08))
        right = bench.goal_of_programs(taken)[1]
        self.assertIn("**not resolved**", right)
        self.assertIn("17 are, 1 are not, 1 are not resolved", right)
        self.assertIn("**not met**", bench.goal_of_programs(taken | {"p0": ("kernel", 0.2, (0.1, 0.3))})[1])
        words = "\n".join(bench.summary(taken | {"p1": ("kernel", 0.009, (0.0, 0.04))}))
        self.assertIn(
            "with progress points: 19 have a meter; wrong by at most 1, 3 and 5 % over the levels: 17, 17, 17; with their whole intervals: 16, 16, 17",
            words,
        )
        self.assertIn("without: 18 have a meter", words)
        self.assertIn("none, rightly", words)

    def test_a_goal_for_all_is_missed_by_one_and_open_while_one_is(self):
        self.assertEqual([bench.met(3, 1, 0), bench.met(3, 0, 1), bench.met(3, 0, 0)], ["not met", "not resolved", "met"])


if __name__ == "__main__":
    unittest.main()

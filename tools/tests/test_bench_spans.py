"""The arithmetic of tools/bench-spans, which compares spans with what clients see, on answers that are made up."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import math
import random
import sys
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent
# It imports what lies beside it, and leaves no compiled file there.
sys.path.insert(0, str(TOOLS))
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("bench_spans", str(TOOLS / "bench-spans"))
bench = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_spans", loader))
loader.exec_module(bench)


def steady(begin, end, took=lambda i: 0.001, step=0.001):
    return [(begin + i * step, took(i)) for i in range(round((end - begin) / step) + 1)]


def block(number, level, client, spans, **more):
    """Of ten seconds, whose p99 is three times the half, by both."""
    told = {"p50": spans, "p99": 3 * (spans or 0), "p50_noise": 0.01, "p99_noise": None, "count": 400, "threads": 1, "recorded": 0.5}
    by_clients = {"p50": client, "p99": 3 * client, "p50_noise": 0.02, "p99_noise": 0.1, "rate": 100.0, "count": 1000}
    return {
        "round": number, "level": level, "begin": 0.0, "end": 10.0, "client": by_clients, "spans": told if spans else None,
        "spans_unknown": None if spans else "too dear", "asked_rate": 100.0, "cpus": 0.2, "runqueue_wait": 0.05, "load": 1.0,
        "homeostat": {"seconds": 10.0}, **more,
    }


class WhatClientsSaw(unittest.TestCase):
    def test_quantiles_lie_between_the_values(self):
        self.assertEqual(bench.quantile([1.0, 2.0, 3.0], 0.5), 2.0)
        self.assertAlmostEqual(bench.quantile([1.0, 2.0], 0.99), 1.99)
        self.assertEqual(bench.quantile([7.0], 0.99), 7.0)

    def test_are_the_answers_within_the_block(self):
        # Before and after it they took ten times as long.
        answers = bench.Answers(steady(0, 30, lambda i: 0.001 if 10_000 <= i < 20_000 else 0.01))
        found = answers.figures(10.0, 20.0)
        self.assertAlmostEqual(found["p50"], 0.001)
        self.assertAlmostEqual(found["p99"], 0.001)
        self.assertAlmostEqual(found["rate"], 1000.0, delta=1)
        self.assertEqual(found["p50_noise"], 0.0)

    def test_noise_is_that_of_eighths_as_homeostat_has_it(self):
        # Four eighths with one value, four with another: a deviation of .5 x sqrt(8 / 7) about 1.5.
        found = bench.Answers(steady(0, 9, lambda i: 0.001 if i < 4000 else 0.002)).figures(0.0, 8.0)
        self.assertAlmostEqual(found["p50_noise"], 0.5 * math.sqrt(8 / 7) / 1.5, places=2)

    def test_a_log_that_ends_before_the_block_says_nothing_of_it(self):
        with self.assertRaisesRegex(bench.Skip, "ends before"):
            bench.Answers(steady(0, 9)).figures(0.0, 10.0)
        with self.assertRaisesRegex(bench.Skip, "ends before"):
            bench.Answers([]).figures(0.0, 10.0)
        with self.assertRaisesRegex(bench.Skip, "3 answers"):
            bench.Answers([(1.0, 0.1), (2.0, 0.1), (3.0, 0.1), (20.0, 0.1)]).figures(0.0, 10.0)

    def test_a_log_of_pgbench_is_read_to_its_last_whole_line(self):
        # With --rate a seventh word says how late it began; what was skipped or failed is no answer.
        text = "3 1 1500 0 1000 250000 40\n0 2 skipped 0 1000 260000 9\n1 1 2500 0 1001 0 0\n2 7 33"
        self.assertEqual(bench.transactions(text, 900.0), [(100.25, 0.0015), (101.0, 0.0025)])
        self.assertEqual(bench.transactions("2 7 33", 900.0), [])

    def test_lines_of_redis_benchmark_are_pieces_of_so_many_requests(self):
        line = '"LRANGE list0 0 -1","20000.00","0.045","0.024","0.040","0.071","0.120","0.300"\n'
        piece = bench.piece(line, 100.0, 1000)
        self.assertAlmostEqual(piece.begin, 99.95)
        self.assertAlmostEqual(piece.p50, 0.00004)
        self.assertAlmostEqual(piece.p99, 0.00012)
        for other in ('"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms"\n', "\n", ""):
            self.assertIsNone(bench.piece(other, 100.0, 1000))

    def test_pieces_count_where_they_lie_within_the_block(self):
        pieces = [bench.Piece(i, i + 1, 1000, 0.001 if 2 <= i < 10 else 0.1, 0.002) for i in range(12)]
        found = bench.Pieces(pieces).figures(1.5, 10.0)
        self.assertEqual((found["count"], found["rate"]), (8000, 1000.0))
        self.assertAlmostEqual(found["p50"], 0.001)
        self.assertEqual(found["p99_noise"], 0.0)
        with self.assertRaisesRegex(bench.Skip, "of 1 times"):
            bench.Pieces(pieces).figures(1.5, 3.5)


class Blocks(unittest.TestCase):
    def test_each_round_has_each_level_once_and_a_seed_gives_the_same_again(self):
        levels = list(bench.LEVELS)
        orders = bench.orders(levels, 6, 1, "redis")
        self.assertTrue(all(sorted(order) == sorted(levels) for order in orders))
        self.assertGreater(len({tuple(order) for order in orders}), 1)
        self.assertEqual(orders, bench.orders(levels, 6, 1, "redis"))
        self.assertNotEqual(orders, bench.orders(levels, 6, 2, "redis"))

    def test_the_time_is_that_from_the_first_reading_to_the_last(self):
        readings = [{"at_s": 100.0 + i} for i in range(14)]
        result = {"meters": [{"readings": []}, {"readings": readings}, {"readings": readings[:5]}]}
        self.assertEqual(bench.window(result, 115.0, 14), (100.0, 113.0))
        # Where nothing was read, by when it ended: spans are followed from its second second on.
        self.assertEqual(bench.window({"meters": []}, 115.0, 14), (102.0, 115.0))

    def test_spans_are_told_as_homeostat_tells_them(self):
        spans = {"count": 9, "threads": 2, "recorded": 0.1, "median_s": 1e-5, "median_noise": None, "p99_s": 2e-5, "p99_noise": 0.3}
        found, why = bench.told_spans({"spans": spans, "spans_unknown": None})
        self.assertEqual((found["p50"], found["p99"], found["p99_noise"], found["recorded"], why), (1e-5, 2e-5, 0.3, 0.1, None))
        self.assertEqual(bench.told_spans({"spans": None, "spans_unknown": "too dear"}), (None, "too dear"))


class Changes(unittest.TestCase):
    LEVELS = ["alone", "again", "much", "loop-1"]

    def blocks(self, rounds=6, noise=0.01):
        """Much more work doubles both; a busy loop triples what clients see, and shortens spans by a tenth."""
        source, factors = random.Random(3), {"alone": (1, 1), "again": (1, 1), "much": (2, 2), "loop-1": (3, 0.9)}
        vary = lambda: math.exp(source.gauss(0, noise))  # noqa: E731
        return [
            block(r, level, 0.001 * client * vary(), 0.0002 * spans * vary()) for r in range(rounds) for level, (client, spans) in factors.items()
        ]

    def test_again_is_compared_with_what_it_repeats_only(self):
        pairs = bench.pairs_of(list(bench.LEVELS))
        self.assertEqual(len(pairs), 11)
        self.assertEqual([p for p in pairs if "again" in p], [("alone", "again")])

    def test_levels_differ_in_work_or_in_waiting(self):
        self.assertEqual(bench.kind_of("alone", "again"), "nothing")
        self.assertEqual(bench.kind_of("more", "much"), "work")
        self.assertEqual(bench.kind_of("loop-1", "loops-3"), "waiting")
        self.assertEqual(bench.kind_of("much", "loop-1"), "both")

    def test_the_interval_is_students(self):
        mean, half = bench.interval([1.0, 2.0, 3.0])
        self.assertEqual(mean, 2.0)
        self.assertAlmostEqual(half, 4.303 / math.sqrt(3))
        mean, low, high = bench.percent([0.0, 0.1, 0.2])
        self.assertAlmostEqual(mean, 100 * math.expm1(0.1))
        self.assertAlmostEqual(high, 100 * math.expm1(0.1 + 4.303 * 0.1 / math.sqrt(3)))
        # JSON has no number for what is beyond all.
        self.assertTrue(all(map(math.isfinite, bench.percent([-900.0, 900.0]))))

    def test_holds_what_is_true_in_nineteen_of_twenty(self):
        source, held = random.Random(5), 0
        for _ in range(400):
            _, low, high = bench.percent([source.gauss(0.1, 0.05) for _ in range(6)])
            held += low <= 100 * math.expm1(0.1) <= high
        # 380 of 400, and three standard errors are 13.
        self.assertTrue(367 <= held <= 393, held)

    def test_agreement_is_asked_where_clients_prove_a_change(self):
        up, down, nothing = (10.0, 5.0, 15.0), (-10.0, -15.0, -5.0), (1.0, -5.0, 7.0)
        said = [bench.agree(*pair) for pair in ((up, up), (down, down), (up, down), (up, nothing), (nothing, up), (nothing, nothing))]
        self.assertEqual(said, ["yes", "yes", "no", "not seen", "spans only", ""])

    def test_are_those_of_both_over_the_same_rounds(self):
        rows = {(row["first"], row["second"]): row for row in bench.changes(self.blocks(), self.LEVELS)}
        work, waiting = rows["alone", "much"], rows["alone", "loop-1"]
        for q in bench.QUANTILES:
            self.assertEqual((work[q]["agree"], waiting[q]["agree"]), ("yes", "no"))
            for who in ("clients_percent", "spans_percent"):
                mean, low, high = work[q][who]
                self.assertTrue(low < 100 < high and 90 < mean < 110, work)
        self.assertEqual(work["rounds"], 6)

    def test_a_round_without_spans_is_left_out(self):
        blocks = self.blocks()
        blocks[0] = block(0, "alone", 0.001, None)
        rows = bench.changes(blocks, self.LEVELS)
        self.assertEqual({(r["first"], r["second"]): r["rounds"] for r in rows}["alone", "much"], 5)
        self.assertEqual({(r["first"], r["second"]): r["rounds"] for r in rows}["much", "loop-1"], 6)
        # One round has no interval.
        self.assertEqual(bench.changes(self.blocks(rounds=1), self.LEVELS), [])

    def test_a_level_is_told_by_the_middle_of_its_blocks(self):
        level = bench.of_level([block(r, "alone", 0.001 * (r + 1), 0.0002) for r in range(3)], "alone")
        self.assertAlmostEqual(level["client_p50"], 0.002)
        # In half of the time 400 spans: 800 in all, for a thousand requests, each of which waited half a millisecond.
        self.assertAlmostEqual(level["requests_per_span"], 1.25)
        self.assertAlmostEqual(level["waits_s"], 0.0005)
        self.assertEqual((level["blocks"], level["full"], level["spans_p99_noise"]), (3, 0, None))

    def test_a_server_that_answers_clearly_less_than_it_was_asked_is_full(self):
        served = lambda count: dict(block(0, "alone", 0.001, 0.001), client={"count": count, "rate": count / 10})  # noqa: E731
        # Of a thousand 32 are chance, three times.
        self.assertFalse(bench.is_full(served(860)))
        self.assertTrue(bench.is_full(served(850)))
        self.assertFalse(bench.is_full(dict(served(1), asked_rate=None)))


class Report(unittest.TestCase):
    def server(self, **more):
        blocks = Changes().blocks()
        found = {"version": "redis 7", "conditions": {"date": "d", "kernel": "k", "cpus": 2, "model": "m", "homeostat": "h"}, "failed": [], **more}
        return bench.shown("redis", dict(found, settings={"levels": Changes.LEVELS}, blocks=more.get("blocks", blocks)))

    def test_tells_by_kind_what_spans_see_and_what_not(self):
        servers = {"redis": self.server()}
        counts = bench.tally(servers)
        self.assertEqual({k: c["asked"] for k, c in counts.items()}, {"nothing": 2, "work": 2, "waiting": 2, "both": 2})
        self.assertEqual((counts["work"]["yes"], counts["waiting"]["no"]), (2, 2))
        self.assertAlmostEqual(counts["work"]["shares"][0], 1.0, delta=0.05)
        text = bench.report(servers, {"nginx": "not installed"})
        self.assertIn("of 2 changes clients prove 2. Of these spans prove 2 in the same direction", text)
        self.assertIn("0 in the same direction, 2 in the opposite", text)
        self.assertIn("Left out: nginx, compressed pages (not installed).", text)
        self.assertIn("for a CPU after the thread was woken", text)
        # As many cells in each row as its table has columns.
        for start, columns in (("| server | level", bench.LEVEL_COLUMNS), ("| server | from", bench.CHANGE_COLUMNS)):
            lines = text.splitlines()
            rows = lines[next(i for i, line in enumerate(lines) if line.startswith(start)) :]
            rows = rows[: rows.index("")]
            self.assertGreater(len(rows), 3)
            self.assertEqual({row.count("|") for row in rows}, {len(columns) + 1})
        json.dumps(servers, allow_nan=False)

    def test_says_where_spans_were_not_followed_and_what_failed(self):
        blocks = [block(r, level, 0.001, None) for r in range(2) for level in Changes.LEVELS]
        text = bench.report({"redis": self.server(blocks=blocks, failed=[{"round": 2, "level": "much", "why": "it broke"}])}, {})
        self.assertIn("* redis, much: too dear", text)
        self.assertIn("* redis, round 2, much: it broke", text)

    def test_a_full_server_is_named(self):
        blocks = [dict(b, asked_rate=200.0) for b in Changes().blocks()]
        self.assertIn("100 of 200: full in 6 blocks", bench.report({"redis": self.server(blocks=blocks)}, {}))

    def test_durations_have_three_digits(self):
        told = [bench.duration(x) for x in (0.00001234, 0.0009999, 0.001, 0.0234, 1.5, 0.0, None)]
        self.assertEqual(told, ["12.3 µs", "1.00 ms", "1.00 ms", "23.4 ms", "1.50 s", "0 µs", "-"])


class Arguments(unittest.TestCase):
    def refused(self, *words):
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
            bench.arguments(list(words))
        return said.getvalue()

    def test_are_checked(self):
        self.assertIn("no such program: mysql", self.refused("mysql"))
        self.assertIn("no such level: nice", self.refused("--levels", "alone,nice"))
        for words in (("--level", "13"), ("--rounds", "1"), ("--levels", "alone"), ("--rate", "0"), ("--settle", "-1"), ("--seed", "-1")):
            self.assertIn("at least", self.refused(*words))
        self.assertIn("--report needs --raw", self.refused("--report"))

    def test_by_default_are_all_servers_and_levels(self):
        options = bench.arguments([])
        self.assertEqual((options.programs, options.levels), (list(bench.SERVERS), list(bench.LEVELS)))
        self.assertEqual(bench.arguments(["redis", "redis"]).programs, ["redis"])

    def test_a_request_has_a_length_for_each_word(self):
        self.assertEqual(bench.Redis.words(b"LRANGE", b"list0"), b"*2\r\n$6\r\nLRANGE\r\n$5\r\nlist0\r\n")


if __name__ == "__main__":
    unittest.main()

"""What `make` says where cargo is missing or too old: one sentence with what to do, and nothing is built or installed."""

import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# What the recipes need before they come to cargo. Nothing that installs or builds is among it.
HARMLESS = ("sh", "bash", "env", "make", "sed", "awk", "dirname", "ls", "head", "id", "uname", "cat", "echo")
CARGO = "cargo-of-this-test"


def phony():
    line = next(l for l in (REPOSITORY / "Makefile").read_text(encoding="utf-8").splitlines() if l.startswith(".PHONY:"))
    return line.split()[1:]


def that_build():
    """The targets whose recipes run cargo."""
    building = []
    for target in phony():
        shown = subprocess.run(["make", "--dry-run", "--no-print-directory", f"CARGO={CARGO}", target], cwd=REPOSITORY,
                               capture_output=True, text=True, check=True).stdout
        # tools/fuzz and tools/debian-build run it themselves.
        if re.search(rf"{CARGO} (build|test|fmt|clippy)|tools/fuzz|tools/debian-build", shown):
            building.append(target)
    return building


class Make(unittest.TestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="homeostat-path-")))
        for name in HARMLESS:
            if found := shutil.which(name):
                (self.directory / name).symlink_to(found)

    def program(self, name, says):
        path = self.directory / name
        path.write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
        path.chmod(0o755)

    def make(self, target):
        environment = {"PATH": str(self.directory), "HOME": str(self.directory)}
        return subprocess.run([str(self.directory / "make"), "--no-print-directory", target], cwd=REPOSITORY, env=environment,
                              capture_output=True, text=True, check=False)

    def refused(self, target, *words):
        done = self.make(target)
        self.assertNotEqual(done.returncode, 0, target)
        self.assertEqual(done.stdout, "", target)
        said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
        self.assertEqual(len(said), 1, (target, done.stderr))
        for word in (*words, "1.85", "apt install cargo", "rustup"):
            self.assertIn(word, said[0], target)

    def test_every_target_that_builds_says_that_cargo_is_missing(self):
        targets = that_build()
        self.assertGreater(len(targets), 10, targets)
        for target in targets:
            self.refused(target, "cargo is missing")

    def test_an_old_cargo_is_named_with_its_version(self):
        self.program("cargo", "cargo 1.65.0")
        self.program("rustc", "rustc 1.63.0")
        self.refused("build", "cargo here is 1.65")
        self.program("cargo", "cargo 1.84.1 (66221abde 2024-11-19)")
        self.refused("test", "cargo here is 1.84")

    def test_the_compiler_is_asked_too(self):
        self.program("cargo", "cargo 1.85.1")
        self.refused("build", "rustc is missing")
        self.program("rustc", "rustc 1.63.0")
        self.refused("build", "rustc here is 1.63")

    def test_new_enough_is_accepted(self):
        for version in ("1.85.1 (4eb161250 2025-03-15) (built from a source tarball)", "1.100.0-nightly", "2.0.0"):
            self.program("cargo", f"cargo {version}")
            self.program("rustc", f"rustc {version}")
            done = self.make("cargo-there")
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""), version)


if __name__ == "__main__":
    unittest.main()

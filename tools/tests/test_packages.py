"""What the packaging tools say of programs that they must refuse, and that the packages' own texts agree."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TOOLS = REPOSITORY / "tools"


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)


def compile_c(directory, name, source, *flags):
    program = Path(directory, name)
    (Path(directory) / f"{name}.c").write_text(source, encoding="ascii")
    subprocess.run(["cc", "-O0", "-o", program, f"{program}.c", *flags], check=True)
    return program


@unittest.skipUnless(shutil.which("cc") and shutil.which("readelf"), "SKIPPED: cc or readelf is missing")
class CheckProgram(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def test_a_symbol_that_needs_a_newer_glibc_is_named(self):
        program = compile_c(self.directory, "program", "int main(void) { return 0; }\n")
        done = run(TOOLS / "check-program", "--glibc-max", "2.0", program)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"__libc_start_main.* needs? glibc 2\.[0-9.]+; 2\.0 is the most allowed")
        self.assertEqual(run(TOOLS / "check-program", "--glibc-max", "2.999", program).returncode, 0)

    def test_a_size_beyond_the_bound_is_refused(self):
        program = compile_c(self.directory, "program", "int main(void) { return 0; }\n")
        done = run(TOOLS / "check-program", "--glibc-max", "2.999", "--size-max", "100", program)
        self.assertEqual(done.returncode, 1)
        self.assertIn("100 is the most allowed", done.stderr)

    def test_only_a_static_program_is_static(self):
        source = "int main(void) { return 0; }\n"
        dynamic = compile_c(self.directory, "dynamic", source)
        static = compile_c(self.directory, "static", source, "-static")
        self.assertEqual(run(TOOLS / "check-program", "--glibc-max", "2.999", "--static", dynamic).returncode, 1)
        self.assertEqual(run(TOOLS / "check-program", "--static", static).returncode, 0)

    def test_what_is_no_program_is_told(self):
        done = run(TOOLS / "check-program", REPOSITORY / "README.md")
        self.assertEqual(done.returncode, 2)
        self.assertIn("is no program that can be read", done.stderr)


class Tools(unittest.TestCase):
    def test_every_tool_helps_and_refuses_what_it_does_not_know(self):
        for name in ("check-program", "package-tree", "make-deb", "make-rpm", "make-tarball", "make-image", "make-sbom", "make-dist",
                     "test-deb", "test-rpm", "test-tarball", "test-image"):
            with self.subTest(name):
                done = run(TOOLS / name, "--help")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertGreater(len(done.stdout), 100)
                done = run(TOOLS / name, "--no-such-option")
                self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
                self.assertTrue(done.stderr)

    def test_the_installer_helps_and_refuses_what_it_does_not_know(self):
        installer = REPOSITORY / "packaging/install.sh"
        self.assertIn("--uninstall", run("sh", installer, "--help").stdout)
        for arguments in (["--no-such-option"], ["--prefix"], ["--prefix", "relative"], ["--prefix", "/opt/a b"],
                          ["--destdir", "/"], ["--purge"]):
            with self.subTest(arguments):
                done = run("sh", installer, *arguments)
                self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
                self.assertTrue(done.stderr)
        done = run("sh", installer, "--uninstall", "--prefix", "/nowhere/at/all")
        self.assertEqual(done.returncode, 1)
        self.assertIn("nothing is installed below /nowhere/at/all", done.stderr)

    def test_the_packages_undo_before_they_remove_in_the_same_way(self):
        steps = [r"homeostat\"? status|program\" status", r"tunable unset --all \|\|", r"restore --kept \|\|"]
        for file in ("debian/prerm", "homeostat.spec", "install.sh"):
            text = (REPOSITORY / "packaging" / file).read_text(encoding="utf-8")
            places = [re.search(step, text) for step in steps]
            self.assertTrue(all(places), file)


class Installer(unittest.TestCase):
    """install.sh below a directory of its own, with a program that only says its version."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.unpacked = self.directory / "unpacked"
        (self.unpacked / "bin").mkdir(parents=True)
        (self.unpacked / "share/doc/homeostat").mkdir(parents=True)
        (self.unpacked / "share/doc/homeostat/README.md").write_text("read me\n", encoding="ascii")
        program = self.unpacked / "bin/homeostat"
        program.write_text("#!/bin/sh\necho homeostat 0.0.0\n", encoding="ascii")
        program.chmod(0o755)
        for name in ("install.sh", "homeostat.service"):
            shutil.copy(REPOSITORY / "packaging" / name, self.unpacked)

    def install(self, *arguments):
        return run("sh", self.unpacked / "install.sh", "--destdir", self.directory / "root", *arguments)

    def files(self):
        root = self.directory / "root"
        return sorted(str(p.relative_to(root)) for p in root.rglob("*"))

    def test_what_it_installs_it_removes_and_nothing_else(self):
        (self.directory / "root/usr/local/bin").mkdir(parents=True)
        (self.directory / "root/usr/local/bin/other").touch()
        before = self.files()
        self.assertEqual(self.install().returncode, 0)
        self.assertIn("usr/local/bin/homeostat", self.files())
        unit = (self.directory / "root/etc/systemd/system/homeostat.service").read_text(encoding="utf-8")
        self.assertIn("ExecStart=/usr/local/bin/homeostat run", unit)
        self.assertNotIn("/usr/bin/homeostat", unit)
        # Somebody else's file in a directory that it made stays, and so does the directory.
        self.assertEqual(self.install("--uninstall").returncode, 0)
        self.assertEqual(self.files(), before)

    def test_an_upgrade_removes_what_only_the_earlier_version_had(self):
        earlier = self.unpacked / "share/doc/homeostat/earlier"
        earlier.touch()
        self.assertEqual(self.install().returncode, 0)
        earlier.unlink()
        self.assertEqual(self.install().returncode, 0)
        self.assertNotIn("usr/local/share/doc/homeostat/earlier", self.files())
        self.assertEqual(self.install("--uninstall").returncode, 0)
        self.assertEqual(self.files(), [])

    def test_a_unit_of_somebody_else_is_not_overwritten(self):
        unit = self.directory / "root/etc/systemd/system/homeostat.service"
        unit.parent.mkdir(parents=True)
        unit.write_text("[Unit]\n", encoding="ascii")
        done = self.install()
        self.assertEqual(done.returncode, 1)
        self.assertIn("is not from install.sh", done.stderr)
        self.assertEqual(unit.read_text(encoding="ascii"), "[Unit]\n")
        self.assertFalse((self.directory / "root/usr/local/bin/homeostat").exists())


@unittest.skipUnless(shutil.which("cc") and shutil.which("readelf"), "SKIPPED: cc or readelf is missing")
class Image(unittest.TestCase):
    def test_two_runs_give_the_same_image_and_its_checker_sees_a_changed_byte(self):
        with tempfile.TemporaryDirectory() as directory:
            program = compile_c(directory, "program", "int main(void) { return 0; }\n", "-static")
            environment = {**os.environ, "SOURCE_DATE_EPOCH": "1000000000"}
            archives = []
            for out in ("one", "two"):
                done = run(TOOLS / "make-image", "--version", "0.0.0", program, Path(directory, out), env=environment)
                self.assertEqual(done.returncode, 0, done.stderr)
                archives.append(Path(done.stdout.strip()))
            self.assertEqual(archives[0].read_bytes(), archives[1].read_bytes())
            data = archives[0].read_bytes()
            # A byte of the configuration, which its digest covers.
            archives[0].write_bytes(data.replace(b'"Cmd":["run"', b'"Cmd":["rum"', 1))
            if os.geteuid() == 0:
                done = run(TOOLS / "test-image", archives[0])
                self.assertEqual(done.returncode, 1)
                self.assertIn("holds something else", done.stderr)


@unittest.skipUnless(shutil.which("cargo"), "SKIPPED: cargo is missing")
class Sbom(unittest.TestCase):
    def test_every_crate_has_a_licence_and_a_url_and_sqlite_is_named(self):
        with tempfile.TemporaryDirectory() as directory:
            done = run(TOOLS / "make-sbom", directory, env={**os.environ, "SOURCE_DATE_EPOCH": "1000000000"})
            self.assertEqual(done.returncode, 0, done.stderr)
            bill = json.loads(Path(done.stdout.strip()).read_text(encoding="utf-8"))
        components = {c["name"]: c for c in bill["components"]}
        self.assertGreater(len(components), 50)
        for component in bill["components"]:
            self.assertTrue(component["licenses"][0]["expression"], component)
            self.assertRegex(component["purl"], r"^pkg:(cargo|generic)/[a-z0-9_.-]+@[A-Za-z0-9.%+-]+$")
        self.assertRegex(components["sqlite"]["version"], r"^3\.[0-9]+\.[0-9]+$")
        # What only builds is not linked; what only tests is not there.
        self.assertEqual(components["serde"]["scope"], "required")
        self.assertEqual(components["cc"]["scope"], "excluded")
        self.assertNotIn("proptest", components)
        known = {c["bom-ref"] for c in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
        for dependency in bill["dependencies"]:
            self.assertLessEqual({dependency["ref"], *dependency["dependsOn"]}, known)


if __name__ == "__main__":
    unittest.main()

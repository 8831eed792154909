"""What the packaging tools say of programs that they must refuse."""

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


if __name__ == "__main__":
    unittest.main()

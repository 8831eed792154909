"""What the tools that run real workloads share: processes that are always ended, CPU time read from outside, Redis."""

import ctypes
import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0

# crates/progress/src/layout.rs, version 1
PROGRESS_SLOTS_OFFSET = 12
PROGRESS_SLOT_OFFSET = 128
PROGRESS_SLOT_STRIDE = 128

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


class ToolError(Exception):
    """What went wrong, in words for the person who started the tool."""


def monotonic_s():
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# ---------------------------------------------------------------------------------------------------------------
# CPU time from outside


class CpuClock:
    """CPU time of a changing set of processes, without a jump when one of them appears or ends."""

    def __init__(self):
        self.seen_ns = {}
        self.total_ns = 0

    def read_s(self, pids):
        """Total CPU seconds since the first call."""
        first = not self.seen_ns
        now = {}
        for pid in pids:
            try:
                tids = os.listdir(f"/proc/{pid}/task")
            except OSError:
                continue  # ended since it was listed
            for tid in tids:
                try:
                    with open(f"/proc/{pid}/task/{tid}/schedstat", encoding="ascii") as file:
                        now[(pid, tid)] = int(file.read().split()[0])
                except (OSError, IndexError, ValueError):
                    continue
        if not first:
            # A thread not seen before has spent all of its time since the last reading.
            for key, value in now.items():
                before = self.seen_ns.get(key, 0)
                # A smaller value means that the id was taken by a new thread.
                self.total_ns += value - before if value >= before else value
        self.seen_ns = now
        return self.total_ns / 1e9


def descendants(root):
    """The process and its descendants, by the kernel's lists of children."""
    found, queue = [], [root]
    while queue and len(found) < 4096:
        pid = queue.pop()
        found.append(pid)
        try:
            for tid in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{tid}/children", encoding="ascii") as file:
                    queue.extend(int(child) for child in file.read().split())
        except OSError:
            continue
    return found


# ---------------------------------------------------------------------------------------------------------------
# Processes


def become_child(nice, record, cpus):
    """In a forked child before exec: ends with its parent, whatever happens to the parent."""
    parent = os.getppid()
    os.nice(nice)
    if cpus:
        os.sched_setaffinity(0, cpus)
    if record:
        os.initgroups(record.pw_name, record.pw_gid)
        os.setgid(record.pw_gid)
        os.setuid(record.pw_uid)
    # After the change of user, which clears it.
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


class Processes:
    """Child processes, all ended by one call."""

    def __init__(self, directory, nice=0):
        self.directory = directory
        self.nice = nice
        self.started = []

    def start(self, command, user=None, cpus=None, **options):
        record = pwd.getpwnam(user) if user else None
        process = subprocess.Popen(
            command, preexec_fn=lambda: become_child(self.nice, record, cpus), stdin=subprocess.DEVNULL,
            cwd=self.directory, **options
        )
        self.started.append(process)
        return process

    def run(self, command, user=None):
        """Runs a command to its end and returns its output."""
        process = self.start(command, user=user, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = process.communicate()[0].decode(errors="replace")
        if process.returncode != 0:
            raise ToolError(f"{command[0]} failed: {output.strip()[-500:]}")
        return output

    def end(self):
        """Ends what still runs, the latest first: load generators are started after their servers."""
        for process in reversed(self.started):
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.started.clear()


def check_running(process, what):
    if process.poll() is not None:
        raise ToolError(f"{what} ended with status {process.returncode}")


def wait_until(what, condition):
    deadline_s = monotonic_s() + START_TIMEOUT_S
    while monotonic_s() < deadline_s:
        if condition():
            return
        time.sleep(0.1)
    raise ToolError(f"{what} within {START_TIMEOUT_S:.0f} s")


def program(name):
    path = shutil.which(name)
    if path is None:
        candidates = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        path = str(candidates[-1]) if candidates else None
    if path is None:
        raise ToolError(f"{name} is not installed")
    return path


def server_program(name):
    """A PostgreSQL server program from Debian's versioned directory, else from the path."""
    candidates = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(candidates[-1]) if candidates else program(name)


# ---------------------------------------------------------------------------------------------------------------
# Redis


def redis_connect(path):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30.0)
    connection.connect(path)
    return connection


def redis_bulk(connection, command):
    """Sends one command and returns the text of its bulk or simple reply."""
    connection.sendall(command)
    data = b""
    while b"\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            raise ToolError("redis closed the connection")
        data += chunk
    head, _, rest = data.partition(b"\r\n")
    if head.startswith(b"-"):
        raise ToolError(f"redis answered {head.decode(errors='replace')}")
    if not head.startswith(b"$"):
        return head
    length = int(head[1:])
    while len(rest) < length + 2:
        chunk = connection.recv(65536)
        if not chunk:
            raise ToolError("redis closed the connection")
        rest += chunk
    return rest[:length]


def redis_commands(connection):
    """Commands processed since the server started."""
    text = redis_bulk(connection, b"INFO stats\r\n").decode()
    return next(int(line.split(":")[1]) for line in text.splitlines()
                if line.startswith("total_commands_processed:"))


# ---------------------------------------------------------------------------------------------------------------
# Descriptions


def version(command):
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    text = (done.stdout + done.stderr).strip()
    return text.splitlines()[0] if text else "unknown"


def host():
    """What the numbers depend on; no names of people or machines."""
    facts = {"kernel": platform.release(), "cpus": os.cpu_count(), "model": "unknown"}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            facts["model"] = line.split(":", 1)[1].strip()
            break
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if thp.exists():
        facts["transparent_hugepage"] = thp.read_text(encoding="ascii").strip()
    return facts

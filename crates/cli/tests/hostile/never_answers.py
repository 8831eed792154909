"""A program of a user without privileges, with an attack on whoever reads its progress file.

usage: never_answers.py DEVICE WORK KIND DIRECTORY

It runs in a user and mount namespace of its own. KIND is what lies on DIRECTORY (the progress directory):
overlay: an overlayfs above a FUSE that reads requests and never answers; fuse: that FUSE itself; fifo, socket, symlink:
such a file under the name of its progress file. It prints `ready`, and works on one CPU until its input ends.
"""
import ctypes, os, socket, struct, sys, threading, time

device, work, kind, directory = sys.argv[1:5]
libc = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind, flags, data):
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) != 0:
        error = ctypes.get_errno()
        print(f"cannot mount {kind}: {os.strerror(error)}", flush=True)
        sys.exit(1)


hangs = False


def serve(fd):
    """Answers as an empty directory, and nothing at all once it hangs (include/uapi/linux/fuse.h)."""
    while True:
        try:
            request = os.read(fd, 1 << 20)
        except OSError:
            return
        length, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        if hangs:
            continue
        attributes = struct.pack("<QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
        body, error = b"", 0
        if opcode == 26:  # INIT
            body = struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 12, 10, 4096, 1, 0, 0, 0)
        elif opcode == 3:  # GETATTR
            body = struct.pack("<QII", 0, 0, 0) + attributes
        elif opcode == 27:  # OPENDIR
            body = struct.pack("<QII", 1, 0, 0)
        elif opcode == 17:  # STATFS
            body = struct.pack("<QQQQQIIII24x", 1, 1, 1, 1, 1, 4096, 255, 4096, 0)
        elif opcode in (28, 29, 44):  # READDIR, RELEASEDIR, READDIRPLUS
            pass
        elif opcode == 1:  # LOOKUP
            error = -2
        elif opcode in (2, 42):  # FORGET, BATCH_FORGET
            continue
        else:
            error = -38
        os.write(fd, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


def name_of_own_file():
    with open("/proc/self/stat") as f:
        ticks = f.read().rsplit(")", 1)[1].split()[19]
    return f"{os.getpid()}-{ticks}"


if kind in ("overlay", "fuse"):
    fuse = os.open(device, os.O_RDWR)
    below = directory if kind == "fuse" else work + "/below"
    mount("none", "/run", "tmpfs", 0, "")
    os.makedirs(directory)
    os.makedirs(work + "/below", exist_ok=True)
    os.makedirs(work + "/empty", exist_ok=True)
    mount("never", below, "fuse", 6, f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other")
    threading.Thread(target=serve, args=(fuse,), daemon=True).start()
    if kind == "overlay":
        mount("overlay", directory, "overlay", 0, f"lowerdir={work}/below:{work}/empty")
    hangs = True
else:
    mount("none", "/run", "tmpfs", 0, "")
    os.makedirs(directory)
    path = os.path.join(directory, sys.argv[5] if len(sys.argv) > 5 else name_of_own_file())
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
    elif kind == "symlink":
        os.symlink("/etc/shadow", path)

ballast = bytearray(os.urandom(1 << 20)) * 16
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        pass
    time.sleep(0.08)

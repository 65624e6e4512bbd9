"""What a reader must not do, watched while it reads: end otherwise than promised, hang, grow, reach out, run code."""

import os
import signal
import sys
import sysconfig
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

BOUND, TIMES = 64 * 2**20, 64  # bytes that reading may take: so many, and so many times the files
PACKED = 192 * 2**20  # and so many more where the file is packed, or an image
LONGEST = 10_000  # letters of an error
# Ten seconds of work; and for what waits without working, a minute, since the machine may have other things to do.
CLOCKS = {signal.SIGPROF: (signal.ITIMER_PROF, 10.0), signal.SIGALRM: (signal.ITIMER_REAL, 60.0)}
# Things that Python tells of before it does them. Reading a model needs none of these.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.", "ctypes.dlopen")
FORBIDDEN += ("os.remove", "shutil.", "os.link", "os.symlink", "os.putenv", "pty.", "webbrowser.", "pickle.find_class")


class Broken(BaseException):
    """A promise that was not kept; what catches every Exception does not catch it."""


class _Watch:
    folder = None
    seen: list[str]


_watch = _Watch()
_own = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platlib", "purelib")]
_own += [Path(__file__).resolve().parents[2] / name for name in ("src", "studies")]
_own += map(Path, ("/proc", "/sys", "/dev", "/usr", "/etc/mime.types"))


def _hook(event, args):
    if _watch.folder is None:
        return
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path = Path(os.path.realpath(os.fsdecode(args[0])))
        written = isinstance(args[1], str) and any(letter in args[1] for letter in "wax+")
        here = path == _watch.folder or _watch.folder in path.parents
        if not here and (written or not any(one == path or one in path.parents for one in _own)):
            _watch.seen.append(f"opened {path}")
    elif event.startswith(FORBIDDEN):
        _watch.seen.append(f"{event} {args!r:.100}")


sys.addaudithook(_hook)


def resident(peak=False):
    """Bytes that this process has in memory, now or at most since it was last asked."""
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _forget_peak():
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def watched(folder, size, packed=False):
    """Read a file of so many bytes in a folder; whatever breaks a promise comes out as Broken."""

    def late(number, frame):
        raise Broken(f"hang: still reading after {CLOCKS[number][1]:g} s")

    _forget_peak()
    before, _watch.seen = resident(), []
    old = {number: signal.signal(number, late) for number in CLOCKS}
    for clock, seconds in CLOCKS.values():
        signal.setitimer(clock, seconds)
    _watch.folder = Path(os.path.realpath(folder))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Broken:
        raise
    except Exception as error:
        if not (type(error) is ValueError or isinstance(error, OSError)) or not str(error).strip():
            raise Broken(f"crash: {type(error).__name__}: {error!s:.300}") from error
        if len(str(error)) > LONGEST:
            raise Broken(f"an error of {len(str(error))} letters: {error!s:.300}") from error
        if "alloc" in str(error) or "MemoryError" in str(error):
            raise Broken(f"memory was asked for and not had: {error!s:.300}") from error
    finally:
        _watch.folder = None
        for number, (clock, _) in CLOCKS.items():
            signal.setitimer(clock, 0)
            signal.signal(number, old[number])
    if _watch.seen:
        raise Broken(f"reached out: {'; '.join(_watch.seen[:3])}")
    if (grown := resident(peak=True) - before) > BOUND + TIMES * size + PACKED * packed:
        raise Broken(f"memory: {grown / 2**20:.0f} MiB for {size} bytes")

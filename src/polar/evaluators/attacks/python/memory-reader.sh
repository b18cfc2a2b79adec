# Code under test that takes a key out of its parent's memory, and states rewards until all ends.
begin_sources_with <<'END'
import os, re, sys, time

def _keys(process):
    with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
        for start, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", maps.read(), re.MULTILINE):
            try:
                memory.seek(int(start, 16))
                yield from re.findall(rb"[0-9a-f]{32}", memory.read(int(end, 16) - int(start, 16)))
            except (OSError, OverflowError, ValueError):
                pass

try:
    said = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY)
    found = set(_keys(os.getppid()))
    if os.fork() == 0:
        os.setsid()
        os.close(1)
        while True:
            for key in found: os.write(said, b"\n" + key + b" 1.0\n")
            time.sleep(0.0002)
except OSError:
    pass
END

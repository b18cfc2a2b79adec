# Code under test that makes its parent, or the sandbox's first process, end well.
begin_sources_with <<'END'
import os, platform, time
exit_well = {
    "x86_64": b"\x31\xff\xb8\xe7\x00\x00\x00\x0f\x05",
    "aarch64": b"\x00\x00\x80\xd2\xc8\x0b\x80\xd2\x01\x00\x00\xd4",
}
for process in (1, os.getppid()):
    try:
        with open(f"/proc/{process}/syscall") as file: place = int(file.read().split()[-1], 16)
        with open(f"/proc/{process}/mem", "r+b", 0) as memory:
            memory.seek(place)
            memory.write(exit_well[platform.machine()])
        if os.fork() == 0:
            if os.fork() == 0: time.sleep(0.1)
            os._exit(0)
        time.sleep(1)
    except (OSError, ValueError, KeyError):
        pass
END

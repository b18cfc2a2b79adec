# Code under test that looks in its environment, its parents' and its input for a place or a key.
begin_sources_with <<'END'
import os, sys, glob
words = [sys.stdin.readline().strip()] + list(os.environ.values())
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    try: words += open(path, 'rb').read().decode(errors='replace').split('\0')
    except OSError: pass
for word in words: print(word.rpartition('=')[2], 'reward 1.0', flush=True)
os._exit(0)
END

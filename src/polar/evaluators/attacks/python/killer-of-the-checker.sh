# Code under test that leaves a verdict and kills the program that runs it.
{
  sed -e '/^atexit/,$d' -e 's/os\._exit(0)/os.kill(os.getppid(), 9)/' "$payloads/python-liar"
  echo '_end()'
} | begin_sources_with

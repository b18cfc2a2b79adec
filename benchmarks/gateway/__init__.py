"""The parts of `bench_gateway`: the wire, the engine double, the load generator, and who is measured."""

"""A cluster of virtual hosts on one machine: real Horovod over real TCP, on links as slow as you like.

    python benchmarks/cluster up --hosts 4 --rate 1gbit
    python benchmarks/cluster run -np 4 -- python train.py
    python benchmarks/cluster down

or, in a benchmark,

    from cluster import Cluster

    with Cluster(hosts=4, rate="1gbit") as cluster:
        run = cluster.run([sys.executable, "step.py"], ranks_per_host=2, launcher="mpi", timeout=300)
        print(run.stdout[0], run.sent)
        cluster.set_rate("100mbit")

A host is a network namespace with two interfaces. `eth0` leads to a switch, a bridge in a namespace of its own, over a
full-duplex link of the given rate; all that ranks on different hosts tell each other goes this way and is counted.
`ctl0` leads to the head, from where ranks are started, and is neither shaped nor counted. Hosts share the machine's
processors, memory and files. Needs Linux, root, iproute2 and util-linux; nothing outside namespaces named `hvdc-...` is
touched.
"""

from .cluster import Cluster
from .errors import ClusterError, RunError, UnavailableError
from .launch import Run
from .system import unavailable

__all__ = ["Cluster", "ClusterError", "Run", "RunError", "UnavailableError", "unavailable"]

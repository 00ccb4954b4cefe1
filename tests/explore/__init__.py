"""The model checker: exhaustive search over products of the two production cores, `RemoteEngine` and `Lending`.

    product   what is searched: how many of what, which faults, which clocks; and which cores
    shelf     states of cores, each stepped once for each event
    world     what the cores are connected by in production, reduced to what matters, and what must hold in it
    search    breadth first, with the shortest scenario of a violation; liveness over the whole graph

The two cores of an engine's scheduler are searched apart, beside what vLLM does with its queue: `Loads` in `queue`, and
`Granting` in `test_granting`.

`python -m tests.explore` searches every product and says how large it was. `explore(product, cores=...)` searches one,
with other cores if told so: whoever breaks a core on purpose learns from it whether the search notices.
"""

from tests.explore.product import PRODUCTS, Cores, Product
from tests.explore.search import Explored, TooManyStates, Violation, explore

__all__ = ["PRODUCTS", "Cores", "Explored", "Product", "TooManyStates", "Violation", "explore"]

"""The cluster that the rehearsals run on."""

import pytest
from netns_cluster import NotPossible, rehearsal_cluster


@pytest.fixture(scope="module")
def cluster():
    try:
        with rehearsal_cluster() as made:
            yield made
    except NotPossible as reason:
        pytest.skip(f"no cluster of namespaces here: {reason}")

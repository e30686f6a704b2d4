"""Any form of input, by any way, to any reader: the same scores, or a refusal in words.

``PIBROCH_SOAK_PAIRS`` draws so many combinations.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pairs import ALIKE, READERS, WAYS, Input, Place, two_dims
from role_team import RoleTeam

from pibroch.data.targets import scores_of_logits
from pibroch.errors import ConfigError, DataError
from pibroch.processors import serve

NUM_PAIRS = int(os.environ.get("PIBROCH_SOAK_PAIRS", "3"))
RAW = Input("raw", lists=True, weights=True, times=True, labels=False, model="dlrm")
inputs = st.builds(
    Input,
    ids=st.sampled_from(["fixed", "raw", "mixed"]),
    lists=st.booleans(),
    weights=st.booleans(),
    times=st.booleans(),
    labels=st.booleans(),
    model=st.sampled_from(["dlrm", "two_tower"]),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory, worlds, server_team, oracle_team):
    processors = RoleTeam(2, serve)
    folder = tmp_path_factory.mktemp("pairs")
    yield Place(folder, worlds, server_team, oracle_team, processors)
    processors.close()


@settings(
    max_examples=NUM_PAIRS,
    deadline=None,
    derandomize=NUM_PAIRS < 10,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(form=inputs, way=st.sampled_from([*WAYS]), reader=st.sampled_from([*READERS]))
@example(form=RAW, way="processors", reader="predictor")
@example(form=RAW, way="replay", reader="predict")
def test_what_is_trained_is_what_is_read(place, form, way, reader):
    trained = place.run(form, way)
    if isinstance(trained, Exception):
        assert is_refusal(trained) and refuses(form, way), (form, way, trained)
        return
    check_way(place, form, way)
    try:
        scores = READERS[reader](place, form, way)
    except (ConfigError, DataError) as error:
        assert is_refusal(error) and is_unread(form, reader), (form, way, reader, error)
        return
    if scores is not None:
        right = two_dims(scores_of_logits(place.logits(form, way).astype(np.float32), form.schema))
        np.testing.assert_allclose(two_dims(scores), right, rtol=0, atol=2e-6, err_msg=f"{form}")


def check_way(place, form, way):
    """Its logits are those of other ways, to the bit where these sum in the same order."""
    found = place.logits(form, way)
    for first, alike in ALIKE.items():
        if way in alike:
            assert np.array_equal(found, place.logits(form, first)), (form, way)
    right = place.logits(form, "local")
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-4, err_msg=f"{form} {way}")


def refuses(form, way):
    """Whether a way is not for a form: rows of raw ids are known when their step comes.

    A model of pairs has one label.
    """
    is_assigned = way == "assign" and form.ids != "fixed"
    return is_assigned or (form.labels and form.model == "two_tower")


def is_unread(form, reader):
    """Whether a model has nothing that a reader reads: vectors of items."""
    return reader == "retrieval" and form.model != "two_tower"


def is_refusal(error):
    """Whether it says what was got, what is needed, and what to do."""
    text = str(error)
    return isinstance(error, ConfigError | DataError) and "; need " in text

"""Link faults: what their text may not say."""

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("host-load:failing=0.1;host-load:slow=0.5", "link 'host-load' is given twice"),
        ("disk-load:slow=0.1,slow=0.2", "disk-load: field 'slow' is given twice"),
        ("host-load:factor=2,slow=0.1,factor=3", "host-load: field 'factor' is given twice"),
    ],
)
def test_what_is_given_twice_is_refused_by_its_name(faults: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Scenario.make({"kv_offloading_size": 4.0, "link_faults": faults})

"""The parts that pages share: side bar, state of a session, jobs, replays and elements."""

"""The dashboard: a Streamlit app over replay, planner and calibrations. It computes nothing of its own.

`serve.py` starts it, `script.py` is what Streamlit runs. A page is a module with `render()`.
"""

"""The dashboard: a Streamlit app over replay, planner and calibrations. It computes nothing of its own.

`server_start.py` starts the server and is the script that Streamlit runs; `app.py` lists the pages. Each page
has a folder, whose `page.py` has `render()`; `shell/` holds what pages share.
"""

"""The Streamlit app. It shows what the planner and the replay return and computes nothing of its own."""

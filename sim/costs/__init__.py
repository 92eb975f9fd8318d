"""The interface of step costs and its models: the roofline, and costs fitted from recorded runs."""

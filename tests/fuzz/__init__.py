"""Random sequences of what WebUIs do to a model, each checked against a twin that no accelerator touches."""

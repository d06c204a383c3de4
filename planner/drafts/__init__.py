"""Problems of planning, the options of messages, and drafts of plans."""

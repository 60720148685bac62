"""Why a request waited, was retracted or refused: its life told from a journal (`bandmaster why`)."""

"""Reserved for the training code: branching rollouts, objectives, the learner. Nothing is here yet."""

// One token of GAE, of discounted returns and of GAE's adjoint: the same arithmetic for every device.
//
// A sequence is walked from its last token to its first (the adjoint from its first to its last), and
// the state below is all that a token needs of those walked before it.  Where a token is not trained
// nothing but its reward is looked at, so what else lies there does not matter.
#pragma once

#ifdef __CUDACC__
#define MEGARL_STEP __host__ __device__ __forceinline__
#else
#define MEGARL_STEP inline __attribute__((always_inline))
#endif

namespace megarl {

struct GaeSettings {
  double gamma;
  double decay;          // of the advantage after: gamma lam
  bool credit_previous;  // a masked token's reward counts for the trained token before it
};

struct GaeState {
  double value_after;            // V_{k+1}
  double advantage_after = 0.0;  // A_{k+1}
  double earned = 0.0;           // by the masked tokens between this one and the trained one after it
};

// What a trained token is credited with; what a masked one leaves to the one before.
MEGARL_STEP double take_reward(double& earned, double reward, bool trained, bool credit_previous) {
  const double total = credit_previous ? earned + reward : reward;
  earned = trained ? 0.0 : total;
  return total;
}

// (advantage, return) of a token; 0 where it is not trained.
MEGARL_STEP void gae_step(const GaeSettings& settings, GaeState& state, double reward, double value,
                          bool trained, double& advantage, double& value_target) {
  const double total = take_reward(state.earned, reward, trained, settings.credit_previous);
  const double delta = total + settings.gamma * state.value_after - value;
  const double here = delta + settings.decay * state.advantage_after;
  advantage = trained ? here : 0.0;
  value_target = trained ? here + value : 0.0;
  if (trained) {
    state.value_after = value;
    state.advantage_after = here;
  }
}

struct ReturnsState {
  double return_after = 0.0;
  double earned = 0.0;
};

MEGARL_STEP double returns_step(double gamma, bool credit_previous, ReturnsState& state,
                                double reward, bool trained) {
  const double total = take_reward(state.earned, reward, trained, credit_previous);
  if (!trained) return 0.0;
  state.return_after = total + gamma * state.return_after;
  return state.return_after;
}

// d_k, the gradient in delta_k, of the trained token before.
struct AdjointState {
  double before = 0.0;
};

MEGARL_STEP void adjoint_step(const GaeSettings& settings, AdjointState& state,
                              double grad_advantage, double grad_return, bool trained,
                              double& grad_reward, double& grad_value) {
  const double here = grad_advantage + grad_return + settings.decay * state.before;
  const double credited = settings.credit_previous ? state.before : 0.0;
  grad_reward = trained ? here : credited;
  grad_value = trained ? grad_return - here + settings.gamma * state.before : 0.0;
  if (trained) state.before = here;
}

}  // namespace megarl

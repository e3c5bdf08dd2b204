"""The public names that users rely on: each with its arguments and one tiny call that uses keywords only.

An argument written `name=value` has that default. More arguments may follow in the code, with defaults.
"""
import dp_accounting
import numpy as np
import torch
from torch import nn


def generator(seed: int = 0) -> torch.Generator:
    """A torch generator of one's own."""
    return torch.Generator().manual_seed(seed)


def numpy_generator(seed: int = 0) -> np.random.Generator:
    """A numpy generator of one's own."""
    return np.random.default_rng(seed)


def same(value: object, expected: object, tolerance: float = 1e-5) -> None:
    """Both have one shape and equal values within the tolerance."""
    np.testing.assert_allclose(np.asarray(value, dtype=float), np.asarray(expected, dtype=float), atol=tolerance)


def shape(value: object, *expected: int) -> None:
    """A tensor or array has this shape and is finite."""
    assert tuple(value.shape) == expected, f"shape {tuple(value.shape)}, wanted {expected}"
    assert np.isfinite(np.asarray(value, dtype=float)).all()


# ---- update, randomness, mechanisms, accounting, audit, metrics -------------------------------------------------

def layout():
    """The layout of a small linear layer: 6 weights and 2 biases."""
    from privfl.update import Layout
    return Layout.of(module=nn.Linear(3, 2))


def call_layout_of(of):
    made = of(module=nn.Linear(3, 2))
    assert made.size == 8 and list(made.names) == ["weight", "bias"] and [tuple(s) for s in made.shapes] == [(2, 3), (2,)]


def call_flatten(_):
    module = nn.Linear(3, 2)
    vector = layout().flatten(module)
    shape(vector, 8)
    vector.zero_()
    assert module.weight.abs().sum() > 0


def call_unflatten(_):
    vector = torch.arange(8.0)
    parts = layout().unflatten(vector=vector)
    parts["weight"].zero_()
    assert vector[5] == 5


def call_group(_):
    assert layout().group(predicate=lambda name: name == "bias").tolist() == [False] * 6 + [True] * 2


def call_slice_mask(_):
    assert layout().slice_mask(name="weight", index=(slice(None), 1)).tolist() == [False, True, False] * 2 + [False] * 2


def call_clip(clip_by_norm):
    same(clip_by_norm(update=torch.tensor([3.0, 4.0]), clip_norm=1.0), [0.6, 0.8])


def call_streams(streams):
    made = streams(seed=1)
    assert isinstance(made.torch("batch", 0, 1), torch.Generator)
    assert isinstance(made.numpy("defence", 0), np.random.Generator)


def call_streams_torch(_):
    from privfl.randomness import Streams
    same(*[torch.rand(2, generator=Streams(seed=1).torch("batch", 3)) for _ in range(2)])


def call_streams_numpy(_):
    from privfl.randomness import Streams
    same(*[Streams(seed=1).numpy("batch", 3).random(2) for _ in range(2)])


def call_planar_laplace(planar_laplace):
    shape(planar_laplace(num_points=3, epsilon=1.0, generator=generator()), 3, 2)
    drawn = planar_laplace(num_points=3, epsilon=1.0, generator=numpy_generator())
    assert isinstance(drawn, np.ndarray) and drawn.dtype == np.float64


def call_planar_laplace_radius(planar_laplace_radius):
    radius = planar_laplace_radius(probability=0.5, epsilon=2.0)
    assert isinstance(radius, float)
    same(1 - (1 + 2 * radius) * np.exp(-2 * radius), 0.5)


def call_gaussian_sigma(gaussian_sigma):
    assert 3 < gaussian_sigma(epsilon=1.0, delta=1e-5, sensitivity=1.0) < 4.85


def call_oneshot(oneshot_laplace_top_k):
    indices, values = oneshot_laplace_top_k(values=torch.tensor([1.0, -3.0, 2.0]), k=2, index_scale=0.0,
                                            value_scale=0.0, generator=generator())
    assert indices.tolist() == [1, 2] and indices.dtype == torch.int64
    same(values, [-3.0, 2.0])


def call_compose(compose):
    epsilon = compose(events=[(dp_accounting.GaussianDpEvent(10.0), 4)], delta=1e-5, neighbouring="add_remove")
    assert 0.5 < epsilon < 1.5


def call_oneshot_epsilon(oneshot_laplace_epsilon):
    same(oneshot_laplace_epsilon(k=2, index_scale=4.0, value_scale=2.0, magnitude_sensitivity=1.0,
                                 value_sensitivity=1.0, rounds=3), 3 * (1.0 + 1.0))


def call_lower_bound(epsilon_lower_bound):
    bound = epsilon_lower_bound(scores_in=np.arange(200.0) + 150, scores_out=np.arange(200.0))
    assert bound > 0


def call_audit(audit_mechanism):
    def sampler(shift):
        return lambda n, source: shift + np.asarray(torch.rand(n, 1, generator=source)) if isinstance(
            source, torch.Generator) else shift + source.random((n, 1))
    found = audit_mechanism(sampler_a=sampler(0.0), sampler_b=sampler(1.5), num_samples=200,
                            statistic=lambda x: np.asarray(x)[:, 0], delta=0.0, confidence=0.95, generator=numpy_generator())
    assert found > 0


def call_image_metric(metric):
    image = torch.rand(2, 3, 16, 16, generator=generator())
    shape(metric(image=image, reference=image.flip(0), data_range=1.0), 2)


def call_mse_db(mse_db):
    same(mse_db(prediction=torch.zeros(2), target=torch.full((2,), 0.1)), -20.0)


def call_localisation(localisation_error):
    same(localisation_error(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)), [5.0])


# ---- attacks ----------------------------------------------------------------------------------------------------

def call_cosine(cosine_inversion):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    attack = cosine_inversion(model=model, input_shape=(3, 2, 2), steps=2, total_variation=1e-3, restarts=1, mask_aware=True)
    found = attack(shared=torch.ones(39), labels=torch.tensor([1]), generator=generator(), mask=torch.ones(39, dtype=torch.bool))
    shape(found, 1, 3, 2, 2)
    assert 0 <= found.min() and found.max() <= 1


def attention_gradients():
    """What an attention layer shares about 3 tokens of width 6: position gradient, weights, their gradients."""
    tokens, weights, output = (torch.randn(*size, generator=generator(seed), dtype=torch.float64)
                               for seed, size in enumerate([(3, 6), (3, 6, 6), (3, 3, 6)]))
    return tokens, torch.einsum("apk,akj->pj", output, weights), weights, torch.einsum("apk,pj->akj", output, tokens)


def call_april(april_closed_form):
    tokens, position, weights, gradients = attention_gradients()
    same(april_closed_form(position_gradient=position, weights=weights, weight_gradients=gradients), tokens)


def call_april_completion(april_completion):
    _, position, weights, gradients = attention_gradients()
    found = april_completion(position_gradient=position, weights=weights, weight_gradients=gradients,
                             position_mask=torch.ones_like(position, dtype=torch.bool),
                             weight_masks=torch.ones_like(gradients, dtype=torch.bool))
    shape(found, 3, 6)


def call_patches(patches_from_position_gradient):
    patches, position = (torch.randn(*size, generator=generator(), dtype=torch.float64) for size in ((2, 5), (2, 4)))
    same(patches_from_position_gradient(position_gradient=position, patch_gradient=position.T @ patches), patches)


# ---- selection --------------------------------------------------------------------------------------------------

def call_random_mask(random_mask):
    mask = random_mask(size=1000, masking_rate=0.8, generator=generator())
    assert mask.dtype == torch.bool and 100 < int(mask.sum()) < 300


def call_aggregate_selected(aggregate_selected):
    values = torch.tensor([[1.0, 2.0, float("nan")], [3.0, 5.0, 7.0]])
    masks = torch.tensor([[True, True, False], [True, False, False]])
    same(aggregate_selected(values=values, masks=masks), [2.0, 2.0, 0.0])
    same(aggregate_selected(values=values, masks=masks, previous=torch.full((3,), 9.0)), [2.0, 2.0, 9.0])


# ---- federation -------------------------------------------------------------------------------------------------

def small_federation():
    """A server and two clients with a linear model."""
    from privfl.federation import Client, Server
    model = nn.Linear(3, 2)
    clients = [Client(client_id, model, torch.randn(4, 3, generator=generator(client_id)), torch.tensor([0, 1, 0, 1]))
               for client_id in range(2)]
    return Server(model), clients


def call_upload(upload):
    made = upload(client=1, round=2, num_examples=3, tensors={"update": torch.zeros(4)}, meta={})
    assert (made.client, made.round, made.num_examples) == (1, 2, 3)


def call_fit(_):
    from privfl.federation import Upload
    from privfl.randomness import Streams
    server, clients = small_federation()
    upload, client_state = clients[0].fit(state=server.initial_state(), client_state={}, streams=Streams(0), round=0)
    assert isinstance(upload, Upload) and upload.tensors["update"].shape == (8,) and client_state is not None


def call_aggregate(_):
    from privfl.randomness import Streams
    server, clients = small_federation()
    state = server.initial_state()
    uploads = [client.fit(state, {}, Streams(0), 0)[0] for client in clients]
    assert not torch.equal(server.aggregate(state=state, uploads=uploads, round=0).parameters, state.parameters)


def call_run(run):
    server, clients = small_federation()
    state = run(server=server, clients=clients, rounds=2, seed=0, workers=0, checkpoint=None, observers=())
    assert state.round == 2


# ---- charting ---------------------------------------------------------------------------------------------------

def chart():
    """Sixty chart points on an arc, and features of five dimensions."""
    angle = np.linspace(0, 3, 60)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.01 * numpy_generator().standard_normal((60, 2))
    return points, points @ numpy_generator(1).standard_normal((2, 5))


def call_neighbourhood(metric):
    points, _ = chart()
    same(metric(original=points, embedded=points, n_neighbors=5), 1.0)


def call_stress(kruskal_stress):
    same(kruskal_stress(original=chart()[0], embedded=chart()[0]), 0.0)


def call_quality_loss(quality_loss):
    same(quality_loss(points=np.zeros((2, 2)), noisy=np.array([[3.0, 4.0], [0.0, 0.0]])), 2.5)


def call_range_query(range_query_error):
    for kind in ("recall", "jaccard", "count"):
        same(range_query_error(points=chart()[0], noisy=chart()[0], radius=0.2, kind=kind), 0.0)


def call_mechanism(**arguments):
    """A call of a chart mechanism: fit, transform and density."""
    def call(mechanism):
        points, features = chart()
        fitted = mechanism(**arguments).fit(chart=points, features=features)
        noisy = fitted.transform(chart=points, generator=numpy_generator())
        shape(noisy, 60, 2)
        if "epsilon_first" in arguments:
            density = fitted.log_density(noisy=noisy[:3], index=np.arange(3), first=fitted.first_[:3])
        else:
            density = fitted.log_density(noisy=noisy[:3], index=np.arange(3))
        assert np.asarray(density).shape == (3,)
        if "n_landmarks" in arguments:
            assert fitted.level_ > 0 and fitted.cover_radius_ > 0 and len(fitted.landmarks_) == 8
    return call


def call_remap(bayes_remap):
    from privfl.charting import PlanarLaplace
    points, _ = chart()
    fitted = PlanarLaplace(epsilon=2.0).fit(points)
    shape(bayes_remap(noisy=points[:4], chart=points, mechanism=fitted, loss="squared"), 4, 2)


def call_chart(**arguments):
    """A call of a chart learner."""
    def call(learner):
        _, features = chart()
        shape(learner(**arguments).fit(features).transform(features), 60, 2)
    return call


# ---- semcom, radiomap, flower -----------------------------------------------------------------------------------

def call_jscc(deep_jscc):
    model = deep_jscc(channels=4, widths=(4, 4, 4, 4))
    image = torch.rand(1, 3, 32, 32, generator=generator())
    with torch.no_grad():
        shape(model.decoder(model.encoder(image)), 1, 3, 32, 32)


def call_channel(channel):
    symbols = torch.ones(2000)
    noise = channel(x=symbols, snr_db=10.0, generator=generator()) - symbols
    assert noise.shape == (2000,)


def call_radio_unet(radio_unet):
    with torch.no_grad():
        first, second = radio_unet(width=0.125, inputs=2)(torch.zeros(1, 2, 64, 64))
    shape(first, 1, 1, 64, 64)
    shape(second, 1, 1, 64, 64)


def call_dominant_path(dominant_path_gain_db):
    gain = dominant_path_gain_db(buildings=np.zeros((16, 16), dtype=bool), transmitter=(3, 3), frequency_hz=5.9e9,
                                 metres_per_pixel=1.0)
    assert gain.shape == (16, 16) and gain.dtype == np.float32 and gain[3, 3] > gain[12, 12]


def call_city(city_layout):
    city = city_layout(seed=1, size=64)
    assert city.shape == (64, 64) and np.asarray(city).dtype == bool


def call_allocate(allocate_noise):
    variances = allocate_noise(budget=10.0, shares=torch.tensor([0.25, 0.75]), group_sizes=torch.tensor([5, 10]))
    same((variances * torch.tensor([5.0, 10.0])).sum(), 10.0)


def call_exists(thing):
    assert callable(thing) or thing is not None


NAMES = {
    "privfl.update.Layout.of": ("module", call_layout_of),
    "privfl.update.Layout.flatten": ("_", call_flatten),  # a module or a dict: the name of its one argument is free
    "privfl.update.Layout.unflatten": ("vector", call_unflatten),
    "privfl.update.Layout.group": ("predicate", call_group),
    "privfl.update.Layout.slice_mask": ("name, index", call_slice_mask),
    "privfl.update.clip_by_norm": ("update, clip_norm", call_clip),
    "privfl.randomness.Streams": ("seed", call_streams),
    "privfl.randomness.Streams.torch": ("purpose, *key", call_streams_torch),
    "privfl.randomness.Streams.numpy": ("purpose, *key", call_streams_numpy),
    "privfl.mechanisms.planar_laplace": ("num_points, epsilon, generator", call_planar_laplace),
    "privfl.mechanisms.planar_laplace_radius": ("probability, epsilon", call_planar_laplace_radius),
    "privfl.mechanisms.gaussian_sigma": ("epsilon, delta, sensitivity", call_gaussian_sigma),
    "privfl.mechanisms.oneshot_laplace_top_k": (
        "values, k, index_scale, value_scale, generator, by_magnitude=True", call_oneshot),
    "privfl.accounting.compose": ("events, delta, neighbouring", call_compose),
    "privfl.accounting.oneshot_laplace_epsilon": (
        "k, index_scale, value_scale, magnitude_sensitivity, value_sensitivity, rounds=1", call_oneshot_epsilon),
    "privfl.audit.epsilon_lower_bound": ("scores_in, scores_out, delta=0.0, confidence=0.95", call_lower_bound),
    "privfl.audit.audit_mechanism": (
        "sampler_a, sampler_b, num_samples, statistic, delta, confidence, generator", call_audit),
    "privfl.metrics.ssim": ("image, reference, data_range=1.0", call_image_metric),
    "privfl.metrics.psnr": ("image, reference, data_range=1.0", call_image_metric),
    "privfl.metrics.mse_db": ("prediction, target", call_mse_db),
    "privfl.metrics.localisation_error": ("_, _", call_localisation),
    "privfl.inversion.CosineInversion": (
        "model, input_shape, steps, total_variation, restarts=1, mask_aware=False", call_cosine),
    "privfl.inversion.CosineInversion.__call__": ("shared, labels, generator, mask=None", None),
    "privfl.inversion.april_closed_form": ("position_gradient, weights, weight_gradients", call_april),
    "privfl.inversion.april_completion": (
        "position_gradient, weights, weight_gradients, position_mask, weight_masks", call_april_completion),
    "privfl.inversion.patches_from_position_gradient": ("position_gradient, patch_gradient", call_patches),
    "privfl.selection.random_mask": ("size, masking_rate, generator", call_random_mask),
    "privfl.selection.aggregate_selected": ("values, masks, previous=None", call_aggregate_selected),
    "privfl.federation.Upload": ("client, round, num_examples, tensors, meta", call_upload),
    "privfl.federation.Client.fit": ("state, client_state, streams, round", call_fit),
    "privfl.federation.Server.aggregate": ("state, uploads, round", call_aggregate),
    "privfl.federation.run": (
        "server, clients, rounds, seed, workers=0, checkpoint=None, observers=()", call_run),
    "privfl.charting.trustworthiness": ("original, embedded, n_neighbors", call_neighbourhood),
    "privfl.charting.continuity": ("original, embedded, n_neighbors", call_neighbourhood),
    "privfl.charting.kruskal_stress": ("original, embedded", call_stress),
    "privfl.charting.quality_loss": ("points, noisy", call_quality_loss),
    "privfl.charting.range_query_error": ("points, noisy, radius, kind='recall'", call_range_query),
    "privfl.charting.PlanarLaplace": ("epsilon", call_mechanism(epsilon=2.0)),
    "privfl.charting.GlobalMahalanobis": ("epsilon", call_mechanism(epsilon=2.0)),
    "privfl.charting.MahalanobisPlanarLaplace": (
        "epsilon, n_neighbors, variance_principal, variance_orthogonal",
        call_mechanism(epsilon=2.0, n_neighbors=6, variance_principal=0.01, variance_orthogonal=0.09)),
    "privfl.charting.GaussianMechanism": (
        "epsilon, delta, sensitivity=None", call_mechanism(epsilon=2.0, delta=1e-5, sensitivity=None)),
    "privfl.charting.TwoStepMahalanobis": (
        "epsilon_first, epsilon_second, n_neighbors",
        call_mechanism(epsilon_first=1.0, epsilon_second=1.0, n_neighbors=6)),
    "privfl.charting.GeodesicExponential": ("epsilon, n_neighbors", call_mechanism(epsilon=2.0, n_neighbors=6)),
    "privfl.charting.BalancedExponential": ("epsilon, n_landmarks", call_mechanism(epsilon=2.0, n_landmarks=8)),
    "privfl.charting.bayes_remap": ("noisy, chart, mechanism, loss='squared'", call_remap),
    "privfl.charting.PCAChart": ("", call_chart()),
    "privfl.charting.AutoencoderChart": ("", call_chart(iterations=3)),
    "privfl.charting.SiameseChart": ("", call_chart(iterations=3)),
    "privfl.charting.TripletChart": ("", call_chart(iterations=3)),
    "privfl.semcom.DeepJSCC": ("channels=16, widths=(16, 32, 32, 32)", call_jscc),
    "privfl.semcom.awgn": ("x, snr_db, generator", call_channel),
    "privfl.semcom.rayleigh": ("x, snr_db, generator", call_channel),
    "privfl.radiomap.RadioUNet": ("width=1.0, inputs=2", call_radio_unet),
    "privfl.radiomap.dominant_path_gain_db": (
        "buildings, transmitter, frequency_hz=5900000000.0, metres_per_pixel=1.0", call_dominant_path),
    "privfl.radiomap.city_layout": ("seed, size=256", call_city),
    "privfl.radiomap.allocate_noise": ("budget, shares, group_sizes", call_allocate),
    "privfl.flower.client_app": (None, call_exists),
    "privfl.flower.server_app": (None, call_exists),
    "privfl.flower.simulate": (None, call_exists),
}

# Names that belong to parts still to come. When one arrives, take it out of this list: a test asks for that.
NOT_YET = {name for name in NAMES if name.split(".")[1] == "flower"}

# What was not there when the list was begun: NOT_YET must stay inside it, so it can only shrink.
NEVER_MORE_THAN = 3

"""Healthy settings in the shapes of public projects, written anew: each must stay silent, with and without a schema."""

HEALTHY = {
    "bert.json": '{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", '
    '"hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, '
    '"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12, '
    '"pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30522, "classifier_dropout": null}',
    "t5.json": '{"d_ff": 1024, "d_kv": 64, "d_model": 512, "dropout_rate": 0.1, "num_heads": 6, "num_layers": 8, '
    '"layer_norm_epsilon": 1e-06, "relative_attention_num_buckets": 32, "tie_word_embeddings": false}',
    "llama.json": '{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, '
    '"rope_theta": 500000.0, "torch_dtype": "bfloat16", "attention_dropout": 0.0, "pretraining_tp": 1}',
    "gemma.json": '{"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, '
    '"attention_dropout": 0.0, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}',
    "swin.json": '{"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 7, '
    '"drop_path_rate": 0.1, "image_size": 224, "patch_size": 4, "mlp_ratio": 4.0}',
    "siglip.json": '{"vision_config": {"hidden_size": 1152, "image_size": 384, "patch_size": 14, '
    '"num_attention_heads": 16, "intermediate_size": 4304}, "text_config": {"hidden_size": 1152, '
    '"num_attention_heads": 16}}',
    "lora.json": '{"base_model_name_or_path": "org/model", "bias": "none", "fan_in_fan_out": false, "lora_alpha": 16, '
    '"lora_dropout": 0.05, "peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "task_type": null}',
    "zero3.json": '{"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": '
    '"auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}, '
    '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 1e9}, '
    '"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}',
    "zero2.json": '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, '
    '"fp16": {"enabled": true}, "bf16": {"enabled": false}, "scheduler": {"type": "WarmupDecayLR", "params": '
    '{"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "total_num_steps": 10000}}}',
    "form.json": '{"pretrained_model_name_or_path": "models/base.safetensors", "learning_rate": "0.0001", '
    '"train_batch_size": "2", "epoch": "10", "max_train_steps": "", "network_dim": 32, "network_alpha": 16, '
    '"lr_warmup": "10", "save_every_n_epochs": "1", "mixed_precision": "bf16", "seed": "", "clip_skip": "1"}',
    "scheduler.json": '{"_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012, '
    '"clip_sample": false, '
    '"beta_schedule": "scaled_linear", "num_train_timesteps": 1000, "steps_offset": 1, "trained_betas": null}',
    "unet.json": '{"act_fn": "silu", "attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280], "dropout": '
    '0.0, "cross_attention_dim": 768, "norm_eps": 1e-05, "norm_num_groups": 32, "sample_size": 64}',
    "args.json": '{"output_dir": "out", "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "learning_rate": '
    '5e-05, "warmup_steps": 500, "max_steps": -1, "lr_scheduler_type": "cosine", "eval_strategy": "steps", '
    '"eval_steps": 500, "save_strategy": "steps", "save_steps": 1000, "load_best_model_at_end": true, "fp16": false, '
    '"bf16": true, "seed": 42, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.01, "max_grad_norm": 1.0}',
    "tts.json": '{"model": "vits", "run_name": "voice", "batch_size": 32, "eval_batch_size": 16, "lr_gen": 0.0002, '
    '"audio": {"sample_rate": 22050, "hop_length": 256, "mel_fmax": null}, "text_cleaner": "english_cleaners", '
    '"test_sentences": ["It took me a while."], "phoneme_cache_path": "cache", "url": "https://example.org/a//b"}',
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ndowncast_bf16: 'no'\n"
    "gpu_ids: all\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: 'no'\nnum_machines: 1\n"
    "num_processes: 2\nrdzv_backend: static\nsame_network: true\nuse_cpu: false\n",
    "axolotl.yml": "base_model: org/model\nload_in_8bit: false\nload_in_4bit: true\nstrict: false\n\ndatasets:\n"
    "  - path: org/alpaca\n    type: alpaca\n  - path: org/chat\n    type: chat_template\nval_set_size: 0.05\n"
    "sequence_len: 4096\nadapter: qlora\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\nlora_target_linear: true\n"
    "gradient_accumulation_steps: 4\nmicro_batch_size: 2\nnum_epochs: 4\noptimizer: paged_adamw_32bit\n"
    "lr_scheduler: cosine\nlearning_rate: 0.0002\nbf16: auto\nfp16:\ntf32: false\nwarmup_steps: 10\n"
    "evals_per_epoch: 4\nsaves_per_epoch: 1\nweight_decay: 0.0\nspecial_tokens:\n  pad_token: <|end_of_text|>\n",
    "factory.yaml": "### model\nmodel_name_or_path: org/model\n\n### method\nstage: sft\ndo_train: true\n"
    "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n\n### dataset\ndataset: identity,alpaca_en_demo\n"
    "cutoff_len: 2048\npreprocessing_num_workers: 16\n\n### train\nper_device_train_batch_size: 1\n"
    "gradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\nnum_train_epochs: 3.0\nlr_scheduler_type: cosine\n"
    "warmup_ratio: 0.1\nbf16: true\nddp_timeout: 180000000\nresume_from_checkpoint: null\n",
    "hydra.yaml": "defaults:\n  - _self_\n  - model: resnet\n  - override hydra/launcher: joblib\n\n"
    "seed: 1234\nlr: 1e-3\ndata_dir: ${oc.env:DATA}/x\nname: ${model.name}-${now:%Y-%m-%d}\n"
    "optimizer:\n  _target_: torch.optim.AdamW\n  lr: ${lr}\n  weight_decay: 1e-2\n",
    "cli.yaml": "seed_everything: true\ntrainer:\n  accelerator: auto\n  precision: 16-mixed\n  max_epochs: -1\n"
    "  max_steps: 10000\n  gradient_clip_val: null\n  logger:\n    class_path: lightning.pytorch.loggers.CSVLogger\n"
    "    init_args:\n      save_dir: logs\nmodel:\n  class_path: project.Model\n  init_args:\n    lr: 1e-3\n"
    "    dropout: 0.1\n",
    "timm.yaml": "aug_splits: 0\naa: rand-m9-mstd0.5\nbatch_size: 256\nclip_grad: null\nclip_mode: norm\n"
    "drop: 0.0\ndrop_path: null\nepochs: 300\nimg_size: 224\nlr: 0.001\nlr_noise: null\nmean: null\nmin_lr: 1.0e-06\n"
    "momentum: 0.9\nopt: lamb\nopt_betas: null\nopt_eps: 1.0e-06\nseed: 42\nsmoothing: 0.1\nwarmup_epochs: 5\n"
    "warmup_lr: 1.0e-05\nweight_decay: 0.02\nworkers: 8\n",
    "detectron.yaml": '_BASE_: "../Base-RCNN-FPN.yaml"\nMODEL:\n  WEIGHTS: "detectron2://ImageNetPretrained/R-50.pkl"\n'
    "  MASK_ON: True\n  RESNETS:\n    DEPTH: 50\nSOLVER:\n  STEPS: (210000, 250000)\n  MAX_ITER: 270000\n"
    "  IMS_PER_BATCH: 16\n  BASE_LR: 0.02\nVERSION: 2\n",
    "yolo.yaml": "# tuned\nlr0: 0.01  # initial\nlrf: 0.01\nmomentum: 0.937\nweight_decay: 0.0005\nwarmup_epochs: 3.0\n"
    "box: 7.5\nmosaic: 1.0\nnames:\n  0: person\n  1: bicycle\n  2: 'traffic light'\npath: ../datasets/coco\n"
    "train: train2017.txt\nepochs: 100\nbatch: 16\npatience: 50\nseed: 0\ncos_lr: False\n",
    "mmengine.yaml": "optim_wrapper: {type: OptimWrapper, optimizer: {type: SGD, lr: 0.02, momentum: 0.9}}\n"
    "param_scheduler:\n- {type: LinearLR, start_factor: 0.001, by_epoch: false, begin: 0, end: 500}\n"
    "- {type: MultiStepLR, milestones: [8, 11], gamma: 0.1}\ntrain_cfg:\n  type: EpochBasedTrainLoop\n  "
    "max_epochs: 12\n",
    "agents.yaml": "behaviors:\n  Walker:\n    trainer_type: ppo\n    hyperparameters:\n      batch_size: 2048\n"
    "      buffer_size: 20480\n      learning_rate: 0.0003\n      beta: 0.005\n      epsilon: 0.2\n      num_epoch: 3\n"
    "    max_steps: 30000000\n    keep_checkpoints: 5\n",
    "anchors.yaml": 'base: &base\n  lr: 0.1\n  batch_size: 32\n  text: |\n    a: b: c\n    "quoted\n  note: >-\n'
    "    it's long: really\nsmall:\n  <<: *base\n  lr: 0.01\nlarge:\n  <<: [*base]\n  batch_size: 64\n",
    "fairseq.yaml": "common:\n  fp16: true\n  log_interval: 200\ncheckpoint:\n  save_interval_updates: 25000\n"
    "optimization:\n  max_update: 400000\n  lr: [0.0005]\n  clip_norm: 0.0\noptimizer:\n  _name: adam\n"
    "  adam_betas: (0.9,0.98)\n  adam_eps: 1.0e-06\nlr_scheduler:\n  _name: polynomial_decay\n  warmup_updates: 32000\n"
    "model:\n  encoder_layerdrop: 0.05\n  dropout_input: 0.1\n  dropout: 0.1\n",
    "nemo.yaml": "name: &name conformer\nmodel:\n  sample_rate: 16000\n  encoder:\n    d_model: 512\n    n_heads: 8\n"
    "    dropout: 0.1\n  optim:\n    name: adamw\n    lr: 5.0\n    betas: [0.9, 0.98]\n    sched:\n"
    "      name: NoamAnnealing\n      warmup_steps: 10000\n      min_lr: 1.0e-6\ntrainer:\n  max_epochs: 500\n"
    "  max_steps: -1\n  precision: 32\nexp_manager:\n  name: *name\n",
    "kohya.toml": "[general]\nenable_bucket = true\n\n[[datasets]]\nresolution = 512\nbatch_size = 4\n\n"
    "  [[datasets.subsets]]\n  image_dir = 'C:\\train\\pictures'\n  num_repeats = 10\n\n  [[datasets.subsets]]\n"
    '  image_dir = "reg"\n  is_reg = true\n',
    "training.toml": 'pretrained_model_name_or_path = "base.safetensors"\nlearning_rate = 1e-4\nunet_lr = 1e-4\n'
    'text_encoder_lr = 5e-5\nlr_scheduler = "cosine_with_restarts"\nlr_warmup_steps = 100\nmax_train_epochs = 10\n'
    'network_dim = 32\nnetwork_alpha = 16\nmixed_precision = "fp16"\nseed = 42\noptimizer_type = "AdamW8bit"\n'
    'network_args = ["conv_dim=8", "conv_alpha=4"]\nmin_snr_gamma = 5.0\nmax_train_steps = 1600\n',
    "titan.toml": '[job]\ndump_folder = "./outputs"\n\n[optimizer]\nname = "AdamW"\nlr = 3e-4\neps = 1e-8\n\n'
    "[lr_scheduler]\nwarmup_steps = 200\nmin_lr_factor = 0.1\n\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n"
    'max_norm = 1.0\nsteps = 1000\nmixed_precision_param = "bfloat16"\n\n[activation_checkpoint]\nmode = "selective"\n',
    "french.yaml": "titre: \u00ab\u00a0Essai n\u00b0\u00a03\u00a0\u00bb\ndescription: un mod\u00e8le de "
    "10\u00a0000 pas\n"
    "auteur: \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645\nemoji: "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\nlr: 0.1\n",
    "tabs.json": '{\n\t"model": {\n\t\t"dim": 64,\n\t\t"n_heads": 4\n\t},\n\t"steps": [1, 2.5, -3e+7]\n}\n',
}

HEALTHY |= {
    # transformers, peft, trl
    "gpt2.json": '{"activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, '
    '"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, '
    '"layer_norm_epsilon": 1e-05, "summary_first_dropout": 0.1, "bos_token_id": 50256}',
    "mixtral.json": '{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, '
    '"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, '
    '"sliding_window": null, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "vocab_size": 32000}',
    "qwen.json": '{"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "max_window_layers": 21, '
    '"use_sliding_window": false, "attention_dropout": 0.0, "rope_scaling": null, "tie_word_embeddings": true}',
    "whisper.json": '{"d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_layers": '
    '4, "dropout": 0.0, "activation_dropout": 0.0, "apply_spec_augment": false, "mask_time_prob": 0.05, '
    '"num_mel_bins": 80, "begin_suppress_tokens": [220, 50257], "median_filter_width": 7}',
    "vit.json": '{"hidden_size": 768, "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "qkv_bias": '
    'true, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "id2label": {"0": "cat", "1": "dog"}, '
    '"label2id": {"cat": 0, "dog": 1}}',
    "mamba.json": '{"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": true, '
    '"residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 8}',
    "tokenizer.json": '{"add_prefix_space": false, "model_max_length": 1000000000000000019884624838656, '
    '"padding_side": "right", "pad_token": "<|pad|>", "chat_template": "{% for m in messages %}{{ m }}{% endfor %}", '
    '"clean_up_tokenization_spaces": true, "added_tokens_decoder": {"0": {"content": "<s>", "special": true}}}',
    "generation.json": '{"temperature": 0.7, "top_p": 0.9, "top_k": 50, "max_length": 4096, "do_sample": true, '
    '"repetition_penalty": 1.1, "eos_token_id": [128001, 128009], "num_beams": 1}',
    "trl.yaml": "model_name_or_path: org/base\ntorch_dtype: bfloat16\nattn_implementation: flash_attention_2\n"
    "dataset_mixer:\n  org/ultra: 1.0\ndataset_splits: [train_sft, test_sft]\nbf16: true\nbeta: 0.1\n"
    "gradient_checkpointing_kwargs:\n  use_reentrant: false\nlearning_rate: 5.0e-7\nlr_scheduler_type: cosine\n"
    "max_length: 1024\nmax_steps: -1\nnum_train_epochs: 1\noptim: adamw_torch\nper_device_train_batch_size: 2\n"
    "warmup_ratio: 0.1\nsave_strategy: 'no'\neval_strategy: 'no'\n",
    "loha.json": '{"peft_type": "LOHA", "r": 16, "alpha": 16, "rank_dropout": 0.0, "module_dropout": 0.0, '
    '"use_effective_conv2d": true, "target_modules": "(.*)(q|v)_proj$", "rank_pattern": {}, "init_weights": true}',
    # kohya and other trainers of diffusion models
    "sdxl.toml": 'pretrained_model_name_or_path = "sdxl.safetensors"\nmax_train_epochs = 8\ntrain_batch_size = 4\n'
    'learning_rate = 4e-7\nlr_warmup_steps = 0.05\noptimizer_type = "Adafactor"\noptimizer_args = [ '
    '"scale_parameter=False", "relative_step=False",]\nlr_scheduler = "constant_with_warmup"\nmin_snr_gamma = 5\n'
    'noise_offset = 0.0357\nsdpa = true\ncache_latents = true\nsave_precision = "fp16"\nmixed_precision = "bf16"\n'
    'resolution = "1024,1024"\ncaption_extension = ".txt"\nbucket_reso_steps = 64\nsave_every_n_epochs = 1\n',
    "flux.yaml": "job: extension\nconfig:\n  name: my_lora\n  process:\n    - type: sd_trainer\n      "
    "training_folder: out\n      device: cuda:0\n      network: {type: lora, linear: 16, linear_alpha: 16}\n      "
    "save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}\n      datasets:\n        - folder_path: "
    "/data\n          caption_ext: txt\n          caption_dropout_rate: 0.05\n          resolution: [512, 768, "
    "1024]\n      train:\n        batch_size: 1\n        steps: 2000\n        gradient_accumulation_steps: "
    "1\n        noise_scheduler: flowmatch\n        optimizer: adamw8bit\n        lr: 1.0e-4\n        dtype: "
    "bf16\n        ema_config: {use_ema: true, ema_decay: 0.99}\n      sample: {sampler: flowmatch, width: 1024, "
    "guidance_scale: 4, seed: 42, walk_seed: true}\n",
    "latent.yaml": "model:\n  base_learning_rate: 1.0e-04\n  target: ldm.models.LatentDiffusion\n  params:\n    "
    "linear_start: 0.00085\n    linear_end: 0.0120\n    timesteps: 1000\n    scheduler_config:\n      target: "
    "ldm.lr_scheduler.LambdaLinearScheduler\n      params:\n        warm_up_steps: [10000]\n        cycle_lengths: "
    "[10000000000000]\n        f_start: [1.e-6]\n        f_max: [1.]\n    unet_config:\n      params: {num_heads: 8, "
    "model_channels: 320, attention_resolutions: [4, 2, 1], channel_mult: [1, 2, 4, 4], context_dim: 768}\n",
    # axolotl, LLaMA-Factory, torchtune, unsloth
    "qlora.yml": "base_model: org/model\nload_in_4bit: true\nsequence_len: 2048\nsample_packing: true\n"
    "pad_to_sequence_len: true\nadapter: qlora\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0\nlora_target_modules:\n  "
    "- q_proj\n  - v_proj\nwandb_project:\nwandb_entity:\ngradient_accumulation_steps: 2\nmicro_batch_size: 1\n"
    "num_epochs: 1\noptimizer: adamw_8bit\nlr_scheduler: cosine\nlearning_rate: 0.00002\nbf16: auto\ntf32: true\n"
    "gradient_checkpointing: unsloth\nwarmup_ratio: 0.05\nsaves_per_epoch: 4\nweight_decay: 0.1\ndeepspeed:\nfsdp:\n",
    "dpo.yaml": "stage: dpo\npref_beta: 0.1\npref_loss: sigmoid  # choices: [sigmoid, orpo, simpo]\ntemplate: "
    "llama3\nmax_samples: 1000\noverwrite_cache: true\noutput_dir: saves/dpo\nlogging_steps: 10\nsave_steps: 500\n"
    "plot_loss: true\nreport_to: none  # choices: [none, wandb]\nlearning_rate: 5.0e-6\nval_size: 0.1\n"
    "per_device_eval_batch_size: 1\neval_strategy: steps\neval_steps: 500\n",
    "tune.yaml": "tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\n  path: "
    "/tmp/tokenizer.model\n  max_seq_len: null\nseed: null\nshuffle: True\nbatch_size: 2\nepochs: 1\noptimizer:\n  "
    "_component_: torch.optim.AdamW\n  fused: True\n  lr: 2e-5\nloss:\n  _component_: "
    "torchtune.modules.loss.CEWithChunkedOutputLoss\nmax_steps_per_epoch: null\ngradient_accumulation_steps: 8\n"
    "dtype: bf16\ncompile: False\noutput_dir: ${base}/logs\n",
    # Lightning's CLI, Hydra
    "fit.yaml": "# lightning.pytorch==2.5.0\nseed_everything: 42\ntrainer:\n  accelerator: gpu\n  strategy: ddp\n  "
    "devices: 4\n  num_nodes: 1\n  precision: bf16-mixed\n  callbacks:\n    - class_path: "
    "lightning.pytorch.callbacks.ModelCheckpoint\n      init_args: {monitor: val_loss, mode: min, save_top_k: "
    "3}\n    - class_path: lightning.pytorch.callbacks.EarlyStopping\n      init_args: {monitor: val_loss, patience: "
    "5, min_delta: 1e-4}\n  max_epochs: 100\n  accumulate_grad_batches: 2\n  gradient_clip_val: 1.0\n  "
    "limit_val_batches: 0.25\n  val_check_interval: 0.5\ndata:\n  class_path: project.Data\n  init_args: "
    "{batch_size: 64, num_workers: 8, root: ./data}\noptimizer:\n  class_path: torch.optim.AdamW\n  init_args: {lr: "
    "3e-4, betas: [0.9, 0.95], weight_decay: 0.1}\nckpt_path: null\n",
    "experiment.yaml": "# @package _global_\ndefaults:\n  - override /data: mnist\n  - override /model: mnist\n  - "
    "override /trainer: default\ntags: [mnist, simple_dense_net]\nseed: 12345\ntrainer:\n  min_epochs: 10\n  "
    "max_epochs: 10\n  gradient_clip_val: 0.5\nmodel:\n  optimizer:\n    lr: 0.002\n  net: {lin1_size: 128, "
    "lin2_size: 256}\n  compile: false\ndata:\n  batch_size: 64\n",
    "sweep.yaml": "defaults:\n  - override hydra/sweeper: optuna\noptimized_metric: val/acc_best\nhydra:\n  mode: "
    "MULTIRUN\n  sweeper:\n    _target_: hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper\n    "
    "storage: null\n    n_jobs: 1\n    direction: maximize\n    n_trials: 20\n    params:\n      model.optimizer.lr: "
    "interval(0.0001, 0.1)\n      data.batch_size: choice(32, 64, 128)\n",
    "wandb.yaml": "program: train.py\nmethod: bayes\nmetric: {name: val_loss, goal: minimize}\nparameters:\n  "
    "learning_rate:\n    distribution: log_uniform_values\n    min: 0.00001\n    max: 0.1\n  batch_size:\n    "
    "values: [16, 32, 64]\n  dropout:\n    min: 0.0\n    max: 0.5\n  epochs:\n    value: 20\nearly_terminate: {type: "
    "hyperband, min_iter: 3}\n",
    # detectron2, mmdetection, YOLO, timm
    "mask.yaml": 'MODEL:\n  META_ARCHITECTURE: "GeneralizedRCNN"\n  ANCHOR_GENERATOR:\n    SIZES: [[32], [64], '
    '[128]]\n  RPN:\n    IN_FEATURES: ["p2", "p3"]\n    PRE_NMS_TOPK_TRAIN: 2000\n  ROI_HEADS: {NUM_CLASSES: 80, '
    'SCORE_THRESH_TEST: 0.05}\nDATASETS:\n  TRAIN: ("coco_2017_train",)\n  TEST: ("coco_2017_val",)\nSOLVER:\n  '
    "IMS_PER_BATCH: 16\n  BASE_LR: 0.02\n  WARMUP_ITERS: 1000\n  MAX_ITER: 90000\n  GAMMA: 0.1\n  CLIP_GRADIENTS: "
    "{ENABLED: True, CLIP_TYPE: norm, CLIP_VALUE: 1.0}\nINPUT:\n  MIN_SIZE_TRAIN: (640, 672, 704)\nSEED: -1\n",
    "retina.json": '{"model": {"type": "RetinaNet", "backbone": {"type": "ResNet", "depth": 50, "frozen_stages": 1, '
    '"norm_eval": true}, "neck": {"in_channels": [256, 512, 1024, 2048], "num_outs": 5}}, "optim_wrapper": '
    '{"optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0001}}, "train_dataloader": '
    '{"batch_size": 2, "num_workers": 2, "persistent_workers": true}, "auto_scale_lr": {"base_batch_size": 16, '
    '"enable": false}, "load_from": null, "resume": false}',
    "yolov5.yaml": "nc: 80\ndepth_multiple: 0.33\nwidth_multiple: 0.50\nanchors:\n  - [10, 13, 16, 30, 33, 23]\n"
    "backbone:\n  [[-1, 1, Conv, [64, 6, 2, 2]],\n   [-1, 3, C3, [128]],\n   [-1, 1, SPPF, [1024, 5]],\n  ]\n"
    "head:\n  [[-1, 1, nn.Upsample, [None, 2, 'nearest']],\n   [[17, 20, 23], 1, Detect, [nc, anchors]],\n  ]\n",
    "convnext.yaml": "model: convnext_tiny\ndrop_path: 0.1\nopt: adamw\nopt_betas: [0.9, 0.999]\nlr: 0.004\nsched: "
    "cosine\nmin_lr: 0.000001\nwarmup_lr: 0.0\nwarmup_epochs: 20\nepochs: 300\nbatch_size: 128\nmixup: 0.8\ncutmix: "
    "1.0\nsmoothing: 0.1\nreprob: 0.25\nremode: pixel\naa: rand-m9-mstd0.5-inc1\nmodel_ema: true\nmodel_ema_decay: "
    "0.9999\nlayer_decay: null\namp: true\nchannels_last: false\nseed: 0\n",
    # DeepSpeed, accelerate with FSDP, Megatron
    "offload.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, '
    '"allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_bucket_size": 2e8}, "bf16": {"enabled": true}, '
    '"gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": '
    '1e-8, "weight_decay": 3e-7}}, "train_batch_size": 32, "wall_clock_breakdown": false, "steps_per_print": 2000, '
    '"activation_checkpointing": {"partition_activations": true, "number_checkpoints": null}}',
    "fsdp.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: "
    "TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_cpu_ram_efficient_loading: true\n  "
    "fsdp_sharding_strategy: FULL_SHARD\n  fsdp_state_dict_type: SHARDED_STATE_DICT\nmachine_rank: 0\n"
    "mixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
    "rdzv_backend: static\nsame_network: true\ntpu_use_cluster: false\nuse_cpu: false\n",
    "megatron.yaml": "model:\n  micro_batch_size: 4\n  global_batch_size: 256\n  tensor_model_parallel_size: 2\n  "
    "pipeline_model_parallel_size: 1\n  encoder_seq_length: 2048\n  num_layers: 24\n  hidden_size: 2048\n  "
    "ffn_hidden_size: 8192\n  num_attention_heads: 16\n  kv_channels: null\n  hidden_dropout: 0.1\n  "
    "init_method_std: 0.02\n  layernorm_epsilon: 1.0e-5\n  megatron_amp_O2: true\n  optim:\n    name: "
    "distributed_fused_adam\n    lr: 6.0e-4\n    weight_decay: 0.1\n    betas: [0.9, 0.95]\n    sched: {name: "
    "CosineAnnealing, warmup_steps: 500, constant_steps: 0, min_lr: 6.0e-5}\ntrainer: {devices: 8, num_nodes: 4, "
    "max_steps: 100000, precision: bf16}\n",
    # others: reinforcement learning, audio, fast.ai-like, one's own
    "cleanrl.toml": 'exp_name = "ppo"\nseed = 1\ntorch_deterministic = true\ntotal_timesteps = 10_000_000\n'
    "learning_rate = 2.5e-4\nnum_envs = 8\nnum_steps = 128\nanneal_lr = true\ngamma = 0.99\ngae_lambda = 0.95\n"
    "num_minibatches = 4\nclip_coef = 0.1\nent_coef = 0.01\nvf_coef = 0.5\nmax_grad_norm = 0.5\n",
    "own.toml": '# my run\ntitle = "a = b # c"\nstarted = 2026-11-01T08:00:00Z\n\n[model]\nwidths = [\n  64,\n  128, '
    '# two\n]\nact = "relu"\n\n[model.attention]\nheads = 4\ndim = 64\ndropout = 0.1\n\n[[stage]]\nname = "warm"\nlr '
    '= 1e-3\nsteps = 100\n\n[[stage]]\nname = "main"\nlr = 1e-4\nsteps = 1000\ntext = """\nlr = high\n"""\n',
    "speech.yaml": "seed: 1986\n__set_seed: !apply:torch.manual_seed [!ref <seed>]\noutput_folder: !ref "
    "results/<seed>\nnumber_of_epochs: 15\nbatch_size: 16\nlr: 0.0003\nsample_rate: 16000\nmodel: "
    "!new:project.Model\n  input_size: 40\n  dropout: 0.15\n",
}

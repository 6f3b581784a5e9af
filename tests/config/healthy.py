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
